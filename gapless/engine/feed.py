"""The engine's side of watching: step records go out in small batches, and only while a watcher is open."""

from __future__ import annotations

import time

from gapless.engine.seam import Core
from gapless.loop.records import StepTable

SEND_STEPS_SECONDS = 0.05
NO_STEPS = StepTable.of()


class StepFeed:
    """Decides which step records to send, and when. Belongs to the thread that drives the core."""

    def __init__(self, core: Core) -> None:
        self.on = False
        self._core = core
        self._last = 0
        self._due = 0.0

    def switch(self, on: bool) -> None:
        """Begin with the steps to come, or end."""
        self._note(self._core.steps_after(0) if on else NO_STEPS)
        self.on = on

    def take(self, all: bool = False) -> StepTable:
        """Return the records that are due now; with `all`, every record, for when the engine comes to rest."""
        now = time.monotonic()
        if not (all or now >= self._due):
            return NO_STEPS
        self._due = now + SEND_STEPS_SECONDS
        return self._note(self._core.steps_after(self._last))

    def _note(self, steps: StepTable) -> StepTable:
        """These are sent, or are of no interest."""
        if len(steps):
            self._last = int(steps.rows["step"][-1])
        return steps
