"""Turnstile: requests that come together begin a few at a time, so that tokens go out in between."""

from __future__ import annotations

import asyncio
from collections import deque

A_TURN = 4
"""Requests that begin in one turn of the event loop. Each takes about half a millisecond of it."""


class Turnstile:
    """Lets a few pass in each turn of the event loop, in the order in which they came.

    Without it, hundreds of requests that arrive at once are all made ready before any of them reaches the engine, and
    before the next token of those that run is read.
    """

    def __init__(self) -> None:
        self._passed = 0
        """How many have begun in this turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return when the caller may begin."""
        loop = asyncio.get_running_loop()
        if self._passed == 0:
            loop.call_soon(self._next_turn)
        elif self._passed >= A_TURN:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._passed += 1

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._passed < A_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            asyncio.get_running_loop().call_soon(self._next_turn)
