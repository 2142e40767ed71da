"""What a command raises, and the exit code that it means."""

from __future__ import annotations

from gapless.base.errors import ConfigError

USAGE = 2
FAILED = 1
INTERRUPTED = 130


class UsageError(ConfigError):
    """The command line, the environment or a config file says something that cannot be done."""
