"""Turnstile: requests that come together begin a few at a time, so that tokens go out in between."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

LEAST_PER_TURN, MOST_PER_TURN = 4, 10
"""Requests that begin in one turn of the event loop. Tokens wait for as long as these take."""
REQUEST_SECONDS = 0.0004
"""The beginning of a request takes about this long. Beyond LEAST_PER_TURN, requests get the time that others took."""


class Turnstile:
    """Lets a few pass in each turn of the event loop, in the order of arrival.

    Without it, hundreds of requests that arrive at once are all made ready before any of them reaches the engine, and
    before the next token of those that run is read. If forwarding tokens makes the turns long, more pass in each, so
    that requests do not starve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._let_in = 0.0
        """When the last ones were let in, seconds."""
        self._allowed = LEAST_PER_TURN
        self._passed = 0
        """How many have begun in this turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when the caller may begin."""
        loop = asyncio.get_running_loop()
        if self._passed == 0:
            self._allowed = LEAST_PER_TURN
            loop.call_soon(self._next_turn)
        elif self._waiting or self._passed >= self._allowed:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._passed += 1

    def _next_turn(self) -> None:
        """Let the next ones in. The loop calls in order: `_measure`, then them, then this again."""
        loop = asyncio.get_running_loop()
        self._passed = 0
        self._let_in = self._clock()
        loop.call_soon(self._measure)
        while self._waiting and self._passed < self._allowed:
            passing = self._waiting.popleft()
            if not passing.done():  # else its request was cancelled
                passing.set_result(None)
                self._passed += 1
        if self._passed:
            loop.call_soon(self._next_turn)

    def _measure(self) -> None:
        """Note that the requests let in are about to begin: the time since the marker was that of all others."""
        others = self._clock() - self._let_in
        self._allowed = min(max(LEAST_PER_TURN, int(others / REQUEST_SECONDS)), MOST_PER_TURN)
