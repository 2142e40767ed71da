"""Connects the devices with guard's checkers; neither room imports the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from gapless import guard
from gapless.base import observe
from gapless.base.errors import CaptureError

if TYPE_CHECKING:
    from gapless.guard.report import Finding

_GROWTH = "allocator-growth"
"""A recorded run may take memory from CUDA; a captured graph takes it from its own pool."""


def connect() -> None:
    """Let devices report to every checker that is switched on, and let no_sync check captures.

    Every engine does this when it is built; a program that uses devices by themselves calls it once.
    """
    package = Path(observe.__file__).parents[1]
    guard.connect(observe, package / "device", package / "testing" / "sim.py")
    observe.check_captures(_without_waits)


@contextmanager
def _without_waits(name: str) -> Iterator[None]:
    """Raises CaptureError when the program inside makes the host wait, even in a region that is silent."""
    from gapless.guard.sync import listening, no_sync
    from gapless.guard.watch import SyncError

    region = no_sync(device_tensors=lambda tensor: True, slow_ms=0)
    try:
        with region, listening():
            yield
    except SyncError as error:
        if error.finding.rule != _GROWTH:
            raise _refusal(name, error.finding) from None
    # A wait that a comment or an allow() excuses is one all the same.
    for entry in region.report.entries():
        if entry.finding.rule != _GROWTH:
            raise _refusal(name, entry.finding)


def _refusal(name: str, finding: Finding) -> CaptureError:
    """Return the finding with the program's own part of the stack, which is between two parts of the recorder's."""
    from gapless.device import record

    inner = dropwhile(lambda frame: frame.file == record.__file__, finding.stack)
    stack = tuple(takewhile(lambda frame: frame.file != record.__file__, inner))
    return CaptureError(f"{name} cannot be captured: {replace(finding, stack=stack).text()}")
