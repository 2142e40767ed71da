"""Commands that are several: `gapless bench serve`, `gapless trace summary`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from gapless.cli.errors import USAGE, UsageError

Kinds = Mapping[str, tuple[Callable[[Sequence[str]], int], str]]
"""By name: what runs it, and what it is for."""


def usage(name: str, about: str, kinds: Kinds, more: str = "") -> str:
    width = max(map(len, kinds)) + 2
    rows = "\n".join(f"  {kind:<{width}}{text}" for kind, (_, text) in kinds.items())
    parts = (
        f"usage: gapless {name} KIND [...]",
        about,
        rows,
        f"  gapless {name} KIND --help    the flags of a kind",
        more,
    )
    return "\n\n".join(part for part in parts if part)


def dispatch(argv: Sequence[str], name: str, about: str, kinds: Kinds, more: str = "") -> int:
    """Run the kind that the first word names. Raises UsageError for one that is not known."""
    kind = argv[0] if argv else ""
    if kind in ("-h", "--help", "help"):
        print(usage(name, about, kinds, more))
        return 0
    if not kind:
        print(usage(name, about, kinds, more), file=sys.stderr)
        return USAGE
    if kind not in kinds:
        raise UsageError(f"gapless {name} knows {', '.join(kinds)}; got {kind!r}")
    return kinds[kind][0](argv[1:])
