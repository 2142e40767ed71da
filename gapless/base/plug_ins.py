"""Entry points: how an installed package adds a tier, a device or another part, without a change here."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from gapless.base.errors import ConfigError


def plug_ins(group: str) -> list[str]:
    """Return the names in this group of all installed packages."""
    return sorted({point.name for point in entry_points(group=group)})


def load(group: str, name: str, field: str) -> Any:
    """Return the object of an entry point. Raises ConfigError, which names `field`, if it cannot be imported."""
    (point, *_) = entry_points(group=group, name=name)
    try:
        return point.load()
    except Exception as error:
        raise ConfigError(f"{field}: {name} ({point.value}) cannot be imported: {error}") from error


def check_name(field: str, name: str, own: Iterable[str], group: str) -> None:
    """Raise ConfigError unless the name is one of ours or of a plug-in. Packages are read only if it is not ours."""
    if name not in own and name not in (others := plug_ins(group)):
        known = ", ".join([*own, *others]) or "the installed ones, which are none"
        raise ConfigError(f"{field} must be one of {known}, got {name!r}")
