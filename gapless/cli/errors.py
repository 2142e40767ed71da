"""What a command raises, and the exit code that it means."""

from __future__ import annotations

from gapless.base.errors import ConfigError, GaplessError

USAGE = 2
FAILED = 1
INTERRUPTED = 130


class UsageError(ConfigError):
    """The command line, the environment or a config file says something that cannot be done."""


class ServerError(GaplessError):
    """The server at --url cannot be reached or answered with an error."""


def exit_code(error: BaseException) -> int:
    """2 for what the user typed, 1 for what went wrong afterwards."""
    return USAGE if isinstance(error, ConfigError) else FAILED
