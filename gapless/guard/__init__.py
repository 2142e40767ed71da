"""no_sync() and no_race(): detectors for any PyTorch program. Imports torch, numpy and the standard library alone.

A copy of this folder works in any project, under any name. Devices of a project's own report through `connect()`.

Nothing is patched and no mode is on until a region is entered; after the last one everything is as it was.
Names are looked up on first use, so that the static lint runs without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hooks import connect
    from .marks import device_tensor, pinned_tensor
    from .race import Race, RaceChecker, RaceError, no_race
    from .report import Finding, SyncReport
    from .sync import Region, allow, no_sync
    from .watch import SyncError

__all__ = [
    "Finding",
    "Race",
    "RaceChecker",
    "RaceError",
    "Region",
    "SyncError",
    "SyncReport",
    "allow",
    "connect",
    "device_tensor",
    "no_race",
    "no_sync",
    "pinned_tensor",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import hooks, marks, race, report, sync, watch

    return next(getattr(module, name) for module in (hooks, marks, race, report, sync, watch) if hasattr(module, name))
