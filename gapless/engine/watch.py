"""The front's side of watching: a bounded log of step records, and looks at what the engine keeps."""

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
LOOK_SECONDS = 10.0
"""A busy engine answers between two steps."""


class StepWatcher:
    """Step records as they come, while at least one watcher is there. One asyncio loop uses it.

    Readers keep a place of their own in the log; who comes too late misses steps and holds no memory.
    """

    def __init__(self, backend: MessageBackend) -> None:
        self._backend = backend
        self.log = StepRing(LOG_STEPS)
        """The newest steps; nothing while no watcher is open. The next one gets the number `log.ended`."""
        self.watchers = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Have the engine send its step records while this is open."""
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
        """The newest steps from `place` on, at most `most`, and how many of them are left out."""
        new = self.log.ended - place
        found = self.log.table(self.log.ended - min(new, most))
        return found, new - len(found)

    async def look(self, since: int) -> EngineView:
        """Return what the engine keeps of the steps since `since` (ns of its clock), and its page map.

        Raises EngineDeadError when the engine does not answer.
        """
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                view: EngineView = await self._backend.ask(partial(m.Look, since=since))
                return view
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer a status request within {LOOK_SECONDS:g} s") from None

    def on_steps(self, steps: StepTable) -> None:
        """Take what the backend delivers."""
        if self.watchers:
            self.log.extend(steps)
