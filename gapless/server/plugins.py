"""Finds dialects of other packages: entry points of the group `gapless.dialects`, loaded if --dialects names them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

from gapless.base.errors import ConfigError
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
    points = {point.name: point for point in entry_points(group=DIALECT_PLUG_INS)}
    if name not in points:
        installed = ", ".join(sorted(points)) or "none"
        raise ConfigError(f"dialects: {name!r} is not installed; entry points of {DIALECT_PLUG_INS}: {installed}")
    where = f"dialects: {name} ({points[name].value})"
    try:
        dialect = points[name].load()
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {error}") from error
    if not isinstance(dialect, Dialect):
        raise ConfigError(f"{where} must be a gapless.server.endpoint.Dialect, got {type(dialect).__name__}")
    return dialect
