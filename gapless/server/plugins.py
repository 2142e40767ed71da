"""Finds dialects of other packages: entry points of the group `gapless.dialects`, loaded if --dialects names them."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.base.errors import ConfigError
from gapless.base.plug_ins import check_name, load
from gapless.server.auth import Access
from gapless.server.endpoint import Dialect, RouteEntry

DIALECT_PLUG_INS = "gapless.dialects"
"""Entry points of this group are dialects: their names, and a `Dialect` each."""


def plugged(names: Sequence[str], routes: Sequence[RouteEntry]) -> list[Dialect]:
    """Return the installed dialects of these names, beside a server's own routes. Raises ConfigError."""
    taken, found = {entry.path for entry in routes}, []
    for name in names:
        dialect = _loaded(name)
        for entry in dialect.routes:
            if entry.path in taken:
                raise ConfigError(f"dialects: {name} has the route {entry.path}, which is taken: leave one out")
            if entry.access is Access.PUBLIC:
                raise ConfigError(f"dialects: {name} opens {entry.path} to all: its access must be USER or OPERATOR")
            taken.add(entry.path)
        found.append(dialect)
    return found


def _loaded(name: str) -> Dialect:
    check_name("dialects", name, (), DIALECT_PLUG_INS)
    dialect = load(DIALECT_PLUG_INS, name, "dialects")
    if not isinstance(dialect, Dialect):
        raise ConfigError(f"dialects: {name} must be a gapless.server.endpoint.Dialect, got {type(dialect).__name__}")
    return dialect
