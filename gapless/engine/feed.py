"""The engine's side of watching: step records go out in small batches, and only while somebody looks."""

from __future__ import annotations

import time

from gapless.engine.seam import Core
from gapless.loop.records import StepRecord

EVERY_SECONDS = 0.05


class StepFeed:
    """Which step records to send when. Belongs to the thread that drives the core."""

    def __init__(self, core: Core) -> None:
        self.on = False
        self._core = core
        self._last = 0
        self._due = 0.0

    def switch(self, on: bool) -> None:
        """Begin with the steps to come, or end."""
        known = self._core.steps_after(0) if on else []
        self._last = known[-1].step if known else 0
        self.on = on

    def take(self, all: bool = False) -> list[StepRecord]:
        """What is due now; `all` that there is, when the engine comes to rest."""
        now = time.monotonic()
        if not (all or now >= self._due):
            return []
        self._due = now + EVERY_SECONDS
        records = self._core.steps_after(self._last)
        if records:
            self._last = records[-1].step
        return records
