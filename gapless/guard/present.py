"""Which accelerator this machine has: the one that torch finds, or the one that a runner was asked to watch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

import torch

from .backends import HOST_TYPES, KINDS_OF_DEVICES, DeviceKind, backend, type_of

OFFERS = "gapless.devices"
"""Packages offer devices by these entry points; a module's function `load` registers its backend."""

_INSTEAD = "--device-tensors cuda emulates CUDA on the CPU"

CHOSEN: list[str] = []
"""The device type that a runner was asked to watch, if it was."""


def accelerator() -> str:
    """Return the device type of the accelerator, or "" where there is none."""
    if CHOSEN:
        return CHOSEN[-1]
    try:
        found = torch.accelerator.current_accelerator(check_available=True)
    except RuntimeError:  # a backend whose module is not registered yet
        return ""
    return "" if found is None else found.type


def owner_of(path: str) -> Any:
    """Return the module or class of torch that has this full name, or None."""
    try:
        return attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        return None


def definer(owner: Any, name: str) -> Any:
    """Return where an attribute is defined: the module or class itself, or the class that it inherits it from."""
    if isinstance(owner, type):
        return next((one for one in owner.__mro__ if name in vars(one)), None)
    return owner if hasattr(owner, name) else None


def module_of(row: DeviceKind) -> Any:
    """Return the module of a kind, such as torch.xpu, or None where torch does not have it."""
    return getattr(torch, row.type, None)


def classes_of(row: DeviceKind, names: Iterable[str]) -> list[Any]:
    """Return the classes of a kind's module that have these names and exist."""
    module = module_of(row)
    return [getattr(module, name) for name in names if hasattr(module, name)]


def allocator_stats(row: DeviceKind, name: str) -> dict[str, int]:
    """Return an allocator's figures, none for a kind that does not count or is not in use yet."""
    module = module_of(row)
    if not getattr(module, "is_initialized", lambda: True)():
        return {}
    try:
        return dict((getattr(module, name, None) or getattr(torch.accelerator, name))())
    except (AttributeError, RuntimeError):
        return {}  # torch.accelerator has them for some kinds


def choose(name: str) -> None:
    """Watch the kind of this name, and load its backend. Raises ValueError if this machine does not have it."""
    kind = type_of(name)
    if kind in HOST_TYPES:
        raise ValueError(f"--device {kind}: that is the host, where nothing waits for a device; {_INSTEAD}")
    row, offered = backend(kind), {point.name: point for point in entry_points(group=OFFERS)}
    if module_of(row) is None and kind in offered:
        _load(offered[kind], kind)
    if module_of(row) is None and row.package:
        raise ValueError(f"--device {kind}: torch.{kind} comes with {row.package}, which is not installed; {_INSTEAD}")
    if module_of(row) is None:
        known = ", ".join([*KINDS_OF_DEVICES, *sorted(offered.keys() - KINDS_OF_DEVICES.keys())])
        raise ValueError(f"--device {kind}: torch has no backend of this name; give one of {known}; {_INSTEAD}")
    if not module_of(row).is_available():
        raise ValueError(f"--device {kind}: torch.{kind}.is_available() is False here; {_INSTEAD}")
    CHOSEN[:] = [kind]


def _load(point: EntryPoint, kind: str) -> None:
    """Have a package register its backend. Raises ValueError with its own error."""
    try:
        point.load()
        getattr(sys.modules[point.module], "load", lambda: None)()
    except Exception as error:
        said = f"{point.value} cannot be loaded: {type(error).__name__}: {error}"
        raise ValueError(f"--device {kind}: {said}; {_INSTEAD}") from error
