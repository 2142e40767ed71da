"""An answer to a generation request, streamed or whole: what every dialect shares, between a job and the socket."""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gapless.engine.outputs import Delta
from gapless.server.endpoint import ClientGone
from gapless.server.errors import ApiError, to_api_error
from gapless.server.generation import Job
from gapless.text.items import Change

WRITE_SECONDS = 30.0
"""A client that takes nothing for this time is given up."""
INLINE_SCORED = 2_000
"""More log-probabilities than these are written on a thread, so that other requests do not wait."""
DIRECT_BODY = "gapless.direct_body"
"""The ASGI extension (a key of scope["extensions"]) of our HTTP protocol that offers a DirectBody."""
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"


class DirectBody:
    """The body of one answer whose head is out, without the layers of ASGI. `cycle` and `flow` are uvicorn's.

    They cost 35 us of a token's 55: python benchmarks/front_cost.py --streams 32 128, on two virtual cores of a Xeon.
    """

    def __init__(self, cycle: Any, flow: Any) -> None:
        self._cycle = weakref.ref(cycle)  # which holds the scope, which holds this
        self._flow = flow

    def takes(self) -> bool:
        """Return whether the client can be written to now. If not, ASGI's `send` waits as needed."""
        return self._live().chunked_encoding and self.flows()

    def flows(self) -> bool:
        """Return whether ASGI's `send` would write now, with the head out or not."""
        cycle = self._live()
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def put(self, data: bytes) -> None:
        """Send a piece, not empty. Only between two calls of `send`, and when it `takes`."""
        assert data, "an empty chunk would end the answer"
        self._live().transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _live(self) -> Any:
        cycle = self._cycle()
        assert cycle is not None, "the answer has ended"
        return cycle


class JobAnswer:
    """The ASGI app that runs one job and answers, as a stream or in one piece, in the form of a subclass: a dialect's.

    Nothing is sent before the first token, or before sse_ping_interval has passed: a failure until then gets a
    truthful status. It is also the TokenSink of a job that has one `plain` choice, whose text is sent as it comes.
    """

    media_type = EVENT_STREAM
    """The content type of a stream"""
    prefix = "gen-"
    """The beginning of the ids of answers"""

    def __init__(self, job: Job, plain: bool = False) -> None:
        self.job = job
        job.call.identity = f"{self.prefix}{secrets.token_hex(12)}"
        self._plain = plain
        self._started = self.opened = False
        """Whether the head is out, and the events before the first token's are"""
        self._body: DirectBody | None = None
        self._sent_at = time.monotonic()
        """When something was sent, other than by `put`"""
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    # A dialect's form

    def opening(self) -> bytes:
        """Return what a stream sends before the first token."""
        return b""

    def changed(self, change: Change) -> bytes:
        """Return what a stream sends for a change of the reply's items."""
        raise NotImplementedError

    def news(self, choice: int, delta: Delta) -> bytes:
        """Return what a stream sends for new tokens, or a choice's end."""
        return b"".join(map(self.changed, self.changes(choice, delta)))

    def token(self, delta: Delta) -> bytes:
        """Return what a stream sends for tokens of the plain choice that do not end it."""
        return self.news(0, delta)

    def ending(self) -> bytes:
        """Return what a stream sends after the last token."""
        return b""

    def failure(self, error: ApiError) -> bytes:
        """Return what ends a stream that failed."""
        raise NotImplementedError

    def sign_of_life(self) -> bytes:
        """Return what a stream sends when it was silent for long; empty for nothing."""
        return KEEP_ALIVE

    def whole(self) -> Any:
        """Return the answer in one piece, to be written as JSON, once the job has ended."""
        raise NotImplementedError

    def changes(self, choice: int, delta: Delta) -> Sequence[Change]:
        """Add new tokens to the choice's items; a whole answer is what these have become."""
        return self.job.changes(choice, delta)

    # One way to send it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self.job
        if not job.streamed:
            await job.call.while_wanted(self._collect(), job.call.deadline)
            body = await job.state.llm.in_pool(self._encoded) if job.scored > INLINE_SCORED else self._encoded()
            await Response(body, media_type="application/json")(scope, receive, send)  # complete: time is up no more
            return
        self._body = scope.get("extensions", {}).get(DIRECT_BODY)
        if self._body is not None and job.state.config.sse_ping_interval > 0:
            self._ping_later(send, job.state.config.sse_ping_interval)
        try:
            await job.call.while_wanted(self._pump(send), job.call.deadline)
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            # No name for it here: it would hold the traceback, and that this frame.
            await self._send(send, self._failed(to_api_error(error)), more=False)
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _collect(self) -> None:
        async with aclosing(self.job.deltas()) as deltas:
            async for choice, delta in deltas:
                self.job.keep(choice, delta)
                self.changes(choice, delta)

    def _encoded(self) -> bytes:
        return msgspec.json.encode(self.whole())

    def _ping_later(self, send: Send, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ping, send)

    def _ping(self, send: Send) -> None:
        """Send a sign of life where nothing else was sent for a while; what waits for the client is one itself."""
        seconds = self.job.state.config.sse_ping_interval
        last = max(self._sent_at, self.job.choices[0].last_at if self._plain else 0.0)
        quiet = time.monotonic() - last
        assert self._body is not None
        if quiet >= seconds and self._body.flows():
            self._pinging = asyncio.create_task(self._show_life(send))
        self._ping_later(send, seconds - quiet if quiet < seconds else seconds)

    async def _show_life(self, send: Send) -> None:
        flows = self._timer is not None and self._body is not None and self._body.flows()
        if flows and (data := self.sign_of_life()):
            await self._send(send, data)  # without a wait, so it cannot come between two parts of what else is written

    def _failed(self, error: ApiError) -> bytes:
        self.job.call.failed(error.code, error.status)
        return self.failure(error)

    async def _pump(self, send: Send) -> None:
        data = b""
        async with aclosing(self.job.deltas(self if self._plain else None)) as deltas:
            async for choice, delta in deltas:
                if not self.opened:
                    data, self.opened = self.opening(), True
                data += self.news(choice, delta)
                if data and self.job.left:  # the last ones go out with the end
                    await self._send(send, data)
                    data = b""
        await self._send(send, data + self.ending(), more=False)

    def put(self, delta: Delta) -> bool:
        """Send a token past the layers of ASGI, if everything before it is sent and the client's buffer has room."""
        body = self._body
        if body is None or not (self._started and self.opened and body.takes()):
            return False
        self.job.note(0, delta)
        if data := self.token(delta):
            body.put(data)
        return True

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        body, self._sent_at = self._body, time.monotonic()
        if not self._started:
            await send(head_of(self.media_type))
            self._started = True
        if body is not None and body.takes():  # `send` does not wait: no timer is needed
            await send(body_part(data, more))
        else:
            await write(send, data, more)


def stream_headers(media_type: str = EVENT_STREAM) -> dict[str, str]:
    # nginx would hold events back
    return {"content-type": media_type, "cache-control": "no-cache", "x-accel-buffering": "no"}


def head_of(media_type: str = EVENT_STREAM) -> Message:
    """Return the head of a streamed answer."""
    headers = [(name.encode(), value.encode()) for name, value in stream_headers(media_type).items()]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body_part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def write(send: Send, data: bytes, more: bool = True) -> None:
    """Send a part of a body. Raises ClientGone for a client that takes too long."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await send(body_part(data, more))
    except TimeoutError:
        raise ClientGone from None
