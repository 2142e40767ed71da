"""A streamed answer as server-sent events, and answers in OpenAI's form, streamed or whole."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.engine.outputs import Delta, TokenLogprobs
from gapless.server.endpoint import ClientGone
from gapless.server.errors import ApiError, to_api_error
from gapless.server.generation import Job, Progress, whole_answer
from gapless.server.logprobs import Writer
from gapless.server.sse import DONE, KEEP_ALIVE, PLAIN, STREAM_HEADERS, Chunks, Usage, deltas_of
from gapless.server.state import new_id
from gapless.text.tokens import Memo

WRITE_SECONDS = 30.0
"""A client that takes nothing for this time is given up."""
DIRECT_BODY = "gapless.direct_body"
"""The ASGI extension (a key of scope["extensions"]) of our HTTP protocol that offers a DirectBody."""

_HEADERS = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]


class DirectBody:
    """The body of one answer whose head is out, without the layers of ASGI. `cycle` and `flow` are uvicorn's."""

    def __init__(self, cycle: Any, flow: Any) -> None:
        self._cycle = weakref.ref(cycle)  # which holds the scope, which holds this
        self._flow = flow

    def takes(self) -> bool:
        """Return whether the client can be written to now. If not, ASGI's `send` waits as needed."""
        cycle = self._live()
        return cycle.chunked_encoding and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def flows(self) -> bool:
        """Return whether ASGI's `send` would write now, with the head out or not."""
        cycle = self._live()
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def put(self, data: bytes) -> None:
        """Send a piece, not empty. Only between two calls of `send`, and when it `takes`."""
        assert data, "an empty chunk would end the answer"
        self._live().transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Write what `send` is given in one piece, since each write is a call to the system."""
        cycle = self._live()
        if self._flow.write_paused:  # `send` will wait
            yield
            return
        transport, pieces = cycle.transport, _Pieces()
        cycle.transport = pieces
        try:
            yield
        finally:
            cycle.transport = transport
            if pieces.written:
                transport.write(b"".join(pieces.written))
            if pieces.closed:
                transport.close()

    def _live(self) -> Any:
        cycle = self._cycle()
        assert cycle is not None, "the answer has ended"
        return cycle


class _Pieces:
    """Stands in for a transport, and does nothing yet."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


class StreamedAnswer:
    """The ASGI app that streams one job, and the TokenSink of a job that has one plain choice.

    Nothing is sent before the first token, or before sse_ping_interval has passed: a failure until then gets a
    truthful status. Which events are sent is for the subclasses, one for each API.
    """

    def __init__(self, job: Job, plain: bool) -> None:
        self._job = job
        self._plain = plain
        """There is one choice, and its text is sent as it comes."""
        self._started = self._opened = False
        """Whether the head is out, and the events before the first token's are"""
        self._body: DirectBody | None = None
        self._sent_at = time.monotonic()
        """When something was sent, other than by `put`"""
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body = scope.get("extensions", {}).get(DIRECT_BODY)
        if self._body is not None and self._job.state.config.sse_ping_interval > 0:
            self._ping_later(send, self._job.state.config.sse_ping_interval)
        try:
            await self._job.call.while_wanted(self._pump(send), self._job.call.deadline)
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            # No name for it here: it would hold the traceback, and that this frame.
            await self._write(send, self._failure(to_api_error(error)), more=False)
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _ping_later(self, send: Send, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ping, send)

    def _ping(self, send: Send) -> None:
        """Send a sign of life where nothing else was sent for a while; what waits for the client is one itself."""
        seconds = self._job.state.config.sse_ping_interval
        last = max(self._sent_at, self._job.choices[0].last_at if self._plain else 0.0)
        quiet = time.monotonic() - last
        assert self._body is not None
        if quiet >= seconds and self._body.flows():
            self._pinging = asyncio.create_task(self._show_life(send))
        self._ping_later(send, seconds - quiet if quiet < seconds else seconds)

    async def _show_life(self, send: Send) -> None:
        if self._timer is not None and self._body is not None and self._body.flows():
            # It does not wait, so it cannot come between two parts of what else is written.
            await self._write(send, self._sign_of_life())

    def _sign_of_life(self) -> bytes:
        return KEEP_ALIVE

    def _opening(self) -> bytes:
        """Return the events that come before the first token's."""
        raise NotImplementedError

    def _chunk(self, choice: int, delta: Delta) -> bytes:
        """Return the events of new tokens, or of a choice's end."""
        raise NotImplementedError

    def _token(self, delta: Delta) -> bytes:
        """Return the events of a token of the only choice, which is plain and does not end with it."""
        return self._chunk(0, delta)

    def _end(self) -> bytes:
        """Return the events that come after the last token's."""
        raise NotImplementedError

    def _error(self, answer: ApiError) -> bytes:
        """Return the events that end a stream which failed."""
        raise NotImplementedError

    def _failure(self, answer: ApiError) -> bytes:
        """Note the answer's failure, and return the event that reports it."""
        self._job.call.failed(answer.code, answer.status)
        return self._error(answer)

    async def _pump(self, send: Send) -> None:
        data = b""
        async with aclosing(self._job.deltas(self if self._plain else None)) as deltas:
            async for choice, delta in deltas:
                if not self._opened:
                    data, self._opened = self._opening(), True
                data += self._chunk(choice, delta)
                if data and self._job.left:  # the last ones go out with the end
                    await self._write(send, data)
                    data = b""
        await self._write(send, data + self._end(), more=False)

    def put(self, delta: Delta) -> bool:
        """Send a token past the layers of ASGI, if everything before it is sent and the client's buffer has room."""
        body = self._body
        if body is None or not (self._started and self._opened and body.takes()):
            return False
        self._job.note(0, delta)
        if data := self._token(delta):
            body.put(data)
        return True

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        body, self._sent_at = self._body, time.monotonic()
        with body.gathered() if body is not None and not self._started else nullcontext():
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                self._started = True
            if body is not None and body.takes():  # `send` does not wait: no timer is needed
                await send(_message(data, more))
            else:
                await write(send, data, more)


class EventStream(StreamedAnswer):
    """Streams the chunks of OpenAI's completions and chat completions.

    `new_writer` makes the writer of a choice's log-probabilities; `echo` has the prompts that are sent too.
    """

    def __init__(self, job: Job, chunks: Chunks, new_writer: Callable[[int], Writer], echo: Sequence[str] = ()) -> None:
        self._scored = job.params.logprobs is not None
        bare = not (self._scored or job.shows_ids or job.shows_times or job.shows_meta or job.readers)
        super().__init__(job, plain=bare and len(job.choices) == 1)
        self._chunks = chunks
        self._writers = Memo(new_writer)
        self._echo = dict(enumerate(text for text in echo for _ in range(job.params.n)))
        self._without_ids = set(range(len(job.choices))) if job.shows_ids else set()
        """Choices whose prompt's ids are asked for and have not been sent"""

    def _opening(self) -> bytes:
        choices = range(len(self._job.choices)) if self._chunks.first else ()
        return b"".join(self._chunks.opening(choice, self._prompt_ids(choice)) for choice in choices)

    def _token(self, delta: Delta) -> bytes:
        # Its prompt was sent before, and its end is the reader's.
        if self._job.usage_in_each:
            return self._chunks.text(0, delta.text, self._job.usage(0))
        return self._chunks.plain(0, delta.text)

    def _end(self) -> bytes:
        if self._job.shows_times:
            self._chunks.more = self._timings()
        return (self._chunks.usage(self._job.usage()) if self._job.usage_at_end else b"") + DONE

    def _error(self, answer: ApiError) -> bytes:
        return b"data: %b\n\n" % answer.encode() + DONE

    def _chunk(self, choice: int, delta: Delta) -> bytes:
        usage = self._job.usage(choice) if self._job.usage_in_each else None
        if self._job.shows_times:
            self._chunks.more = self._timings(choice)
        before = self._prompt(choice) if choice in self._echo else b""
        extra = self._extra(choice, delta) if self._scored or self._job.shows_ids else PLAIN
        if choice in self._job.readers:
            return self._parsed(choice, delta, usage, extra)
        if delta.finish_reason is not None:
            extra += self._meta(choice)
            last = self._chunks.last(choice, delta.text, delta.finish_reason, delta.stop_reason, usage, extra)
            return before + last
        if delta.text or delta.token_ids:  # a token without text is news too: clients time their tokens by events
            return before + self._chunks.text(choice, delta.text, usage, extra)
        return before

    def _parsed(self, choice: int, delta: Delta, usage: Usage | None, extra: bytes) -> bytes:
        """The chunks of a reply that is taken apart. Tokens without an event have one too if something goes with it."""
        reader, reason = self._job.readers[choice], delta.finish_reason
        news = list(deltas_of(self._job.events_of(choice, delta)))
        if not news and delta.token_ids and (extra is not PLAIN or usage is not None):
            news = [b"{}"]
        data = b""
        for one in news:
            data += self._chunks.delta(choice, one, usage, extra)
            extra = PLAIN
        if reason is not None:
            extra = PLAIN + self._meta(choice)
            data += self._chunks.last(choice, "", reader.finish_reason(reason), delta.stop_reason, usage, extra)
        return data

    def _timings(self, choice: int | None = None) -> bytes:
        return b',"timings":%b' % msgspec.json.encode(self._job.timings(choice))

    def _meta(self, choice: int) -> bytes:
        """The field about the choice that goes with its end, if it is asked for."""
        if not self._job.shows_meta:
            return b""
        return b',"meta_info":%b' % msgspec.json.encode(self._job.meta_info(choice))

    def _prompt(self, choice: int) -> bytes:
        """The chunk with the choice's prompt, which comes in front of its first token."""
        stream = self._job.stream_of(choice)
        extra = self._logprobs(choice, stream.prompt_token_ids, stream.prompt_logprobs) + self._prompt_ids(choice)
        return self._chunks.text(choice, self._echo.pop(choice), None, extra)

    def _extra(self, choice: int, delta: Delta) -> bytes:
        extra = self._logprobs(choice, delta.token_ids, delta.logprobs) + self._prompt_ids(choice)
        if self._job.shows_ids:
            extra += b',"token_ids":%b' % msgspec.json.encode(delta.token_ids)
        return extra

    def _prompt_ids(self, choice: int) -> bytes:
        """The field with the ids of the choice's prompt, once, and where it is asked for."""
        if choice not in self._without_ids:
            return b""
        self._without_ids.remove(choice)
        return b',"prompt_token_ids":%b' % msgspec.json.encode(self._job.stream_of(choice).prompt_token_ids)

    def _logprobs(self, choice: int, ids: Sequence[int], entries: Sequence[TokenLogprobs | None] | None) -> bytes:
        if not self._scored or not ids or entries is None:
            return PLAIN
        return b'"logprobs":%b' % msgspec.json.encode(self._writers[choice].write(ids, entries))


def openai_answer(
    job: Job,
    chunks: type[Chunks],
    new_writer: Callable[[int], Writer],
    choice: Callable[[int, Progress], dict[str, Any]],
    more: Callable[[], dict[str, Any]] = dict,
    echo: Sequence[str] = (),
) -> ASGIApp:
    """Make the ASGI app that answers with a job in OpenAI's form, as `chunks` or whole.

    In a whole answer `choice` makes the choices, and `more` further fields. The rest is for EventStream.
    """
    call = job.call
    call.identity, created = new_id(chunks.prefix), int(time.time())
    if job.streamed:
        return EventStream(job, chunks(call.identity, created, call.model, job.usage_at_end), new_writer, echo)

    def encode() -> bytes:
        choices = [choice(index, done) for index, done in enumerate(job.choices)]
        if job.shows_meta:
            choices = [{**each, "meta_info": job.meta_info(index)} for index, each in enumerate(choices)]
        kind = chunks.object.removesuffix(".chunk")
        about = {"id": call.identity, "object": kind, "created": created, "model": call.model}
        said = {"choices": choices, "usage": job.usage(), "system_fingerprint": None}
        handover = {} if job.handover.answer is None else {"kv_transfer_params": job.handover.answer}
        times = {"timings": job.timings()} if job.shows_times else {}
        return msgspec.json.encode({**about, **said, **times, **more(), **handover})

    return whole_answer(job, encode)


async def write(send: Send, data: bytes, more: bool = True) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await send(_message(data, more))
    except TimeoutError:
        raise ClientGone from None


def _message(data: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
