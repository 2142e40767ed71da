"""no_sync() and no_race(): detectors for any PyTorch program. Imports torch, numpy and the standard library alone.

Nothing is patched and no mode is on until a region is entered; after the last one everything is as it was.
Names are looked up on first use, so that the static lint runs without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.guard.marks import device_tensor, pinned_tensor
    from gapless.guard.race import Race, RaceChecker, RaceError, no_race
    from gapless.guard.report import Finding, Report
    from gapless.guard.sync import Region, allow, no_sync
    from gapless.guard.watch import SyncError

__all__ = [
    "Finding",
    "Race",
    "RaceChecker",
    "RaceError",
    "Region",
    "Report",
    "SyncError",
    "allow",
    "device_tensor",
    "no_race",
    "no_sync",
    "pinned_tensor",
]


def __getattr__(name: str) -> Any:
    if name in ("device_tensor", "pinned_tensor"):
        from gapless.guard import marks

        return getattr(marks, name)
    if name in ("Race", "RaceChecker", "RaceError", "no_race"):
        from gapless.guard import race

        return getattr(race, name)
    if name in ("Finding", "Report"):
        from gapless.guard import report

        return getattr(report, name)
    if name in ("Region", "allow", "no_sync"):
        from gapless.guard import sync

        return getattr(sync, name)
    if name == "SyncError":
        from gapless.guard.watch import SyncError

        return SyncError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
