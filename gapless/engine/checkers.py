"""Connects devices with guard's checkers; neither room imports the other."""

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
"""Finding that a capture allows: a recorded run may allocate from CUDA, a captured graph has its own pool."""


def connect() -> None:
    """Let devices report to every active checker, and let no_sync check captures.

    Every engine calls this when it is built; other programs with devices call it once.
    """
    package = Path(observe.__file__).parents[1]
    guard.connect(observe, package / "device", package / "testing" / "sim.py")
    observe.check_captures(_without_waits)


@contextmanager
def _without_waits(name: str) -> Iterator[None]:
    """Raises CaptureError if the program inside makes the host wait, even in a silenced region."""
    from gapless.guard.sync import listening, no_sync
    from gapless.guard.watch import SyncError

    region = no_sync(device_tensors=lambda tensor: True, slow_ms=0)
    try:
        with region, listening():
            yield
    except SyncError as error:
        if error.finding.rule != _GROWTH:
            raise _refusal(name, error.finding) from None
    # A wait excused by a comment or an allow() is still a wait.
    for entry in region.report.entries():
        if entry.finding.rule != _GROWTH:
            raise _refusal(name, entry.finding)


def _refusal(name: str, finding: Finding) -> CaptureError:
    """Return the finding with the program's own part of the stack, found between the recorder's parts."""
    from gapless.device import record

    inner = dropwhile(lambda frame: frame.file == record.__file__, finding.stack)
    stack = tuple(takewhile(lambda frame: frame.file != record.__file__, inner))
    return CaptureError(f"{name} cannot be captured: {replace(finding, stack=stack).text()}")
