"""Tables of commands: `gapless serve`, and below one command its kinds, such as `gapless bench serve`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from gapless.cli.errors import USAGE, UsageError

Table = Mapping[str, tuple[str, str]]
"""name -> (what it is for, where its `main` is: a module of this room, or MODULE:FUNCTION)."""


def run(table: Table, name: str, argv: Sequence[str]) -> int:
    """Run the command `name`, whose module is imported only now, and return its exit code."""
    module, _, function = table[name][1].partition(":")
    return int(getattr(import_module(f"gapless.cli.{module}"), function or "main")(argv))


def rows(table: Table) -> str:
    width = max(map(len, table)) + 2
    return "\n".join(f"  {name:<{width}}{about}" for name, (about, _) in table.items())


def usage(name: str, about: str, table: Table, more: str = "") -> str:
    parts = (
        f"usage: gapless {name} KIND [...]",
        about,
        rows(table),
        f"  gapless {name} KIND --help    the flags of a kind",
        more,
    )
    return "\n\n".join(part for part in parts if part)


def dispatch(argv: Sequence[str], name: str, about: str, table: Table, more: str = "") -> int:
    """Run the kind that the first word names. Raises UsageError for one that is not known."""
    kind = argv[0] if argv else ""
    if kind in ("-h", "--help", "help"):
        print(usage(name, about, table, more))
        return 0
    if not kind:
        print(usage(name, about, table, more), file=sys.stderr)
        return USAGE
    if kind not in table:
        raise UsageError(f"gapless {name} knows {', '.join(table)}; got {kind!r}")
    return run(table, kind, argv[1:])
