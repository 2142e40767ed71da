"""Tables of commands: `gapless serve`, and below one command its kinds, such as `gapless bench serve`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from gapless.base.spellings import did_you_mean
from gapless.cli.errors import USAGE, UsageError

Table = Mapping[str, tuple[str, str]]
"""name -> (its purpose, the place of its `main`: a module of this room, or MODULE:FUNCTION)."""


def rows(table: Table) -> str:
    width = max(map(len, table)) + 2
    return "\n".join(f"  {name:<{width}}{about}" for name, (about, _) in table.items())


def usage(name: str, about: str, table: Table, more: str = "") -> str:
    flags = f"  gapless {name} KIND --help    the flags of a kind"
    return "\n\n".join(filter(None, (f"usage: gapless {name} KIND [...]", about, rows(table), flags, more)))


def dispatch(argv: Sequence[str], name: str, help: str, table: Table) -> int:
    """Run the command that the first word names, in the table `name` ("" for the top one). Raises UsageError."""
    word = argv[0] if argv else ""
    if word in ("-h", "--help", "help"):
        print(help)
        return 0
    if not word:
        print(help, file=sys.stderr)
        return USAGE
    if word not in table:
        typed, see = f"{name} {word}".strip(), f"; see {f'gapless {name}'.strip()} --help"
        raise UsageError(f"unknown command {typed!r}{did_you_mean(word, table) or see}")
    module, _, function = table[word][1].partition(":")
    return int(getattr(import_module(f"gapless.cli.{module}"), function or "main")(argv[1:]))
