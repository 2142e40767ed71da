"""The front's side of watching: a bounded log of step records, and views of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from gapless.base.errors import EngineDeadError
from gapless.engine import messages as m
from gapless.engine.backend import MessageBackend
from gapless.engine.seam import EngineView
from gapless.loop.records import StepRing, StepTable

LOG_STEPS = 4096
VIEW_SECONDS = 10.0
"""Time limit for an engine's view; a busy engine answers between two steps."""


class StepWatcher:
    """Step records while at least one watcher is open. One asyncio loop uses it.

    Readers keep their own place in the log; a late reader misses steps and holds no memory.
    """

    def __init__(self, backend: MessageBackend) -> None:
        self._backend = backend
        self.log = StepRing(LOG_STEPS)
        """The newest steps; empty without a watcher. The next one gets the number `log.ended`."""
        self.watchers = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let the engine send its step records while this is open."""
        self.watchers += 1
        if self.watchers == 1:
            self._backend.watch(True)
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._backend.watch(False)
                self.log.clear()

    def after(self, place: int, most: int) -> tuple[StepTable, int]:
        """Return the newest steps from `place` on, at most `most`, and the number left out."""
        new = self.log.ended - place
        found = self.log.table(self.log.ended - min(new, most))
        return found, new - len(found)

    async def look(self, since: int) -> EngineView:
        """Return the engine's kept steps since `since` (ns of its clock), and its page map.

        Raises EngineDeadError if the engine does not answer.
        """
        try:
            async with asyncio.timeout(VIEW_SECONDS):
                view: EngineView = await self._backend.ask(partial(m.Look, since=since))
                return view
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer a status request within {VIEW_SECONDS:g} s") from None

    def on_steps(self, steps: StepTable) -> None:
        """Take steps from the backend."""
        if self.watchers:
            self.log.extend(steps)
