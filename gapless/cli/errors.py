"""Errors of a command, and their exit codes."""

from __future__ import annotations

from gapless.base.errors import ConfigError

USAGE = 2
FAILED = 1
INTERRUPTED_CODE = 130


class UsageError(ConfigError):
    """The command line, the environment or a config file asks for something impossible."""
