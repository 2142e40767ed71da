"""Turnstile: requests that come together begin a few at a time, so that tokens go out in between."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

LEAST, MOST = 4, 10
"""Requests that begin in one turn of the event loop. A turn's time has theirs in it, so the most bounds them."""
REQUEST_SECONDS = 0.0005
"""What the beginning of a request takes, about"""
SHARE = 0.5
"""Of a turn's time, which requests may take where more than LEAST of them fit into it."""


class Turnstile:
    """Lets a few pass in each turn of the event loop, in the order in which they came.

    Without it, hundreds of requests that arrive at once are all made ready before any of them reaches the engine, and
    before the next token of those that run is read. Where passing on tokens makes the turns long, more pass in each, so
    that requests do not starve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = 0.0
        """When this turn began, seconds"""
        self._allowed = LEAST
        self._passed = 0
        """How many have begun in this turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when the caller may begin."""
        loop = asyncio.get_running_loop()
        if self._passed == 0:
            self._began, self._allowed = self._clock(), LEAST
            loop.call_soon(self._next_turn)
        elif self._passed >= self._allowed:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._passed += 1

    def _next_turn(self) -> None:
        now = self._clock()
        turn, self._began = now - self._began, now
        self._allowed = min(max(LEAST, int(SHARE * turn / REQUEST_SECONDS)), MOST)
        self._passed = 0
        while self._waiting and self._passed < self._allowed:
            passing = self._waiting.popleft()
            if not passing.done():  # else its request was cancelled
                passing.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next_turn)
