"""The front's side of watching: a bounded log of step records, and looks at what the engine keeps."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gapless.base.errors import EngineDeadError
from gapless.engine.seam import Backend, View
from gapless.loop.records import StepRecord

LOG_STEPS = 4096
LOOK_SECONDS = 10.0
"""A busy engine answers between two steps."""


class Watch:
    """Step records as they come, while at least one watcher is there. One asyncio loop uses it.

    Readers keep a place of their own in the log; who comes too late misses steps and holds no memory.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._log: deque[StepRecord] = deque(maxlen=LOG_STEPS)
        self.place = 0
        """Records that have come so far; the next one gets this number."""
        self.watchers = 0
        self._numbers = itertools.count(1)
        self._looks: dict[int, asyncio.Future[View]] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, the engine sends its step records."""
        self.watchers += 1
        if self.watchers == 1:
            self._backend.watch(True)
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._backend.watch(False)
                self._log.clear()

    def after(self, place: int, most: int) -> tuple[list[StepRecord], int]:
        """The newest records from `place` on, at most so many, and how many of them are left out."""
        new = self.place - place
        kept = min(new, most, len(self._log))
        return list(itertools.islice(reversed(self._log), kept))[::-1], new - kept

    def records(self) -> list[StepRecord]:
        """All that the log holds; nothing while nobody watches."""
        return list(self._log)

    async def look(self, since: int) -> View:
        """What the engine keeps of the steps since `since` (ns of its clock), and its page map.

        Raises EngineDeadError when the engine does not answer.
        """
        number = next(self._numbers)
        future: asyncio.Future[View] = asyncio.get_running_loop().create_future()
        self._looks[number] = future
        try:
            self._backend.look(number, since)
            async with asyncio.timeout(LOOK_SECONDS):
                return await future
        except TimeoutError:
            raise EngineDeadError("the engine does not say what it does") from None
        finally:
            del self._looks[number]

    # What the backend delivers.

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        if self.watchers:
            self._log.extend(records)
            self.place += len(records)

    def on_view(self, view: View) -> None:
        future = self._looks.get(view.number)
        if future is not None and not future.done():
            future.set_result(view)

    def on_death(self, error: Callable[[], Exception]) -> None:
        """The engine is gone, and its numbers begin again with the next one."""
        self._log.clear()
        for future in self._looks.values():
            if not future.done():
                future.set_exception(error())
