"""The front's side of what it asks an engine: to change its adapters or weights, to show what it keeps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any


class Questions:
    """Questions that wait for the core's answers. One asyncio loop uses it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.waiting: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, post: Callable[[int], None]) -> Any:
        """Return the core's answer to what `post` asks by its number; raise it where it is an error."""
        number = next(self._numbers)
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            post(number)
            return await future
        finally:
            del self.waiting[number]

    def on_answer(self, number: int, answer: object) -> None:
        """Take an answer. One that came too late is ignored."""
        future = self.waiting.get(number)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def on_death(self, error: Callable[[], Exception]) -> None:
        """The engine is gone: each question is answered with an error of its own."""
        for number in self.waiting:
            self.on_answer(number, error())
