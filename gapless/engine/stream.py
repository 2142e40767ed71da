"""OutputStream: an open request of AsyncLLM. New output goes to the opener's sink, or to a reader."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gapless.engine.inputs import Resolved
from gapless.engine.open_request import OpenRequest
from gapless.engine.outputs import Delta
from gapless.engine.tracker import Tracker


class TokenSink(Protocol):
    """Takes a request's new output in the same turn of the event loop that delivers it.

    Waking a reader costs more than delivering a token, so a sink that can pass a token on does so here.
    """

    def put(self, delta: Delta) -> bool:
        """Take the delta and return True, or return False and leave it to `next`, merged with later ones.

        Called while a reader waits in `next`, but not for the end of the request. An error raised here ends the
        request, and `next` raises it.
        """


class OutputStream(OpenRequest):
    """An open request for its one reader. Always `close` it; that aborts unfinished completions."""

    def __init__(
        self,
        request_id: str,
        resolved: Resolved,
        tracker: Tracker,
        arrival: int,
        sink: TokenSink | None = None,
        label: str = "",
        interval: int = 0,
    ) -> None:
        """`label` and `interval` are OpenRequest's; a sink goes with no interval."""
        super().__init__(request_id, resolved, tracker.tokenizer, arrival, label, interval)
        self._tracker = tracker
        self._sink = sink
        self._wanted: asyncio.Future[None] | None = None
        """Done when there is something to read; None while the reader does not wait."""

    @property
    def finished(self) -> bool:
        """Whether every completion has ended and has been read."""
        return self.ended and not self.has_news

    async def next(self) -> list[Delta]:
        """Return new output since the last call, merged for each completion; waits until there is some.

        Raises QueueFullError, RequestError or EngineDeadError if the request ended with one. Must not be called when
        `finished`. Cancelling this ends nothing: `close` does.
        """
        while not self.has_news:
            self._wanted = asyncio.get_running_loop().create_future()
            try:
                await self._wanted
            finally:
                self._wanted = None
        deltas = self.take()
        if deltas:
            return deltas
        assert self.error is not None
        error, self.error = self.error, None
        raise error

    def wake(self) -> None:
        # An awake reader comes first: its unread news is older.
        wanted = self._wanted
        if wanted is None or wanted.done():
            return
        if self._sink is None or self.ended or not self.offer(self._sink.put):
            wanted.set_result(None)

    def close(self) -> None:
        """Stop reading, and abort unfinished completions at once. Harmless after the end."""
        self._sink = None  # it may hold this stream
        if self._tracker.requests.get(self.request_id) is self:
            self._tracker.abort(self.request_id)
