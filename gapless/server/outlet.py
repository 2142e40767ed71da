"""Outlet: the short way of a streamed answer to its connection, past layers of ASGI that have nothing to do with it."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from typing import Any, Protocol

SCOPE_KEY = "gapless.outlet"
"""Where a request's scope has its Outlet, when the HTTP protocol offers one."""


class Flow(Protocol):
    """The flow control of uvicorn's connection."""

    write_paused: bool


class Outlet:
    """The body of one answer whose head is out. `cycle` and `flow` are uvicorn's.

    Pieces that come in one turn of the event loop go out in one write, each a chunk of its own.
    """

    def __init__(self, cycle: Any, flow: Flow, loop: AbstractEventLoop) -> None:
        self._cycle = cycle
        self._flow = flow
        self._loop = loop
        self._pieces: list[bytes] = []

    def takes(self) -> bool:
        """Whether the client can be written to now. If not, ASGI's `send` knows how to wait, and for what."""
        cycle = self._cycle
        return cycle.chunked_encoding and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def put(self, data: bytes) -> None:
        """Send a piece, not empty. Only between two calls of `send`, and when it `takes`."""
        assert data, "an empty chunk would end the answer"
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(b"%x\r\n%b\r\n" % (len(data), data))

    def _flush(self) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        if not self._cycle.disconnected:
            self._cycle.transport.write(data)
