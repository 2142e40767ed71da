"""What a command raises, and the exit code that it means."""

from __future__ import annotations

from gapless.base.errors import ConfigError, ServerError

__all__ = ["FAILED", "INTERRUPTED", "USAGE", "ServerError", "UsageError", "exit_code"]

USAGE = 2
FAILED = 1
INTERRUPTED = 130


class UsageError(ConfigError):
    """The command line, the environment or a config file says something that cannot be done."""


def exit_code(error: BaseException) -> int:
    """2 for what the user typed, 1 for what went wrong afterwards."""
    return USAGE if isinstance(error, ConfigError) else FAILED
