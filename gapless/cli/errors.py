"""What a command raises, and the exit code that it means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from gapless.base.errors import ConfigError

USAGE = 2
FAILED = 1
INTERRUPTED = 130


class UsageError(ConfigError):
    """The command line, the environment or a config file says something that cannot be done."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, if any is like it at all; leading dashes make nothing alike."""
    bare = {name.lstrip("-"): name for name in known}
    found = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.6)
    return bare[found[0]] if found else None
