"""Plug-ins: objects of other packages, found by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from gapless.base.errors import ConfigError


def plug_ins(group: str) -> list[str]:
    """Return the names of a group's entry points, in order."""
    return sorted({point.name for point in entry_points(group=group)})


def load_plug_in(group: str, name: str, setting: str) -> Any:
    """Import the object of an entry point that exists. Raises ConfigError naming the setting if that fails."""
    (point, *_) = entry_points(group=group, name=name)
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(f"{setting}: {name} ({point.value}) cannot be imported: {error}") from error
