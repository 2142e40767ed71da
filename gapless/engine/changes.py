"""The front's side of changes to an engine: its adapters, its weights."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable


class ChangesUnderWay:
    """Changes that wait for the core's answer. One asyncio loop uses it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def make(self, ask: Callable[[int], None]) -> None:
        """Return when the core has made the change that `ask` asks for by its number. Raises what it refused it with,
        or EngineDeadError."""
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            ask(number)
            await future
        finally:
            del self._waiting[number]

    # What the backend delivers.

    def on_answer(self, number: int, error: Exception | None) -> None:
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def on_death(self, error: Callable[[], Exception]) -> None:
        """The engine is gone."""
        for number in self._waiting:
            self.on_answer(number, error())
