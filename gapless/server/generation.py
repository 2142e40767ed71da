"""One generation request of either endpoint: several prompts, several completions, streamed or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from gapless.base.errors import EngineError, RequestError
from gapless.base.params import SamplingParams
from gapless.engine.async_llm import Stream
from gapless.engine.inputs import Prompt
from gapless.engine.outputs import Delta, TokenLogprobs
from gapless.server.endpoint import Call, ClientGone
from gapless.server.errors import ApiError, to_api_error
from gapless.server.extras import Extras
from gapless.server.logs import log_request
from gapless.server.outlet import SCOPE_KEY, Outlet
from gapless.server.protocol import MAX_SEQUENCES, GenerationRequest, PromptDetails, Usage
from gapless.server.sse import CONTENT_TYPE, DONE, PLAIN, Chunks, error_event
from gapless.server.tracing import Generated

INLINE_SCORED = 2_000
"""More log-probabilities than these are written on a thread, so that they do not hold up everybody else's tokens."""
MAX_SCORED = 4_000_000
"""Log-probabilities of one request, prompts, choices and alternatives together: they stay in memory until its end."""
WRITE_SECONDS = 30.0
"""A client that takes nothing for so long is given up."""


@dataclass(slots=True)
class Progress:
    """What one completion has come to."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_at: float = 0.0


class Job:
    """A checked request, ready to run. The choice of prompt p and completion i is p * n + i.

    With `prompt_only` nothing of what is generated is shown or counted.
    """

    def __init__(
        self, call: Call, request: GenerationRequest, prompts: Sequence[Prompt], params: SamplingParams,
        prompt_only: bool = False,
    ) -> None:  # fmt: skip
        if len(prompts) * params.n > MAX_SEQUENCES:
            raise RequestError(f"prompts times n must be at most {MAX_SEQUENCES} sequences", "n")
        self.state = call.state
        self.call = call
        self.prompts = prompts
        self.params = params
        self.prompt_only = prompt_only
        self.streamed = bool(request.stream)
        self.priority = request.priority or 0
        self.salt = _salt(call.tenant, request.cache_salt)
        self.deadline = call.deadline()
        self.choices = [Progress() for _ in range(len(prompts) * params.n)]
        self.streams: dict[int, Stream] = {}
        self._scored = 0
        self.began = time.monotonic()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """(choice, delta) in the order they come. Closing the iterator aborts what still runs."""
        self.state.metrics.params_n.observe(self.params.n)
        try:
            async with aclosing(self._one(0) if len(self.prompts) == 1 else self._merged()) as deltas:
                async for choice, delta in deltas:
                    self.note(choice, delta)
                    yield choice, delta
        finally:
            account(self)

    async def collect(self) -> None:
        """Run to the end; the texts are in `choices` afterwards."""
        async with aclosing(self.deltas()) as deltas:
            async for choice, delta in deltas:
                entry = self.choices[choice]
                entry.text.append(delta.text)
                entry.token_ids += delta.token_ids
                entry.logprobs += delta.logprobs or ()

    async def written(self, encode: Callable[[], bytes]) -> bytes:
        """The whole answer, made by `encode`, once `collect` is done."""
        return await self.state.llm.in_pool(encode) if self._scored > INLINE_SCORED else encode()

    def stream_of(self, choice: int) -> Stream:
        """The engine's request behind a choice; there once a Delta of it is."""
        return self.streams[choice // self.params.n]

    def usage(self, choice: int | None = None) -> Usage:
        """Token counts so far, of one choice or of all."""
        streams = list(self.streams.values()) if choice is None else [self.streams[choice // self.params.n]]
        prompt = sum(len(stream.prompt_token_ids) for stream in streams)
        done = sum(c.tokens for c in self.choices) if choice is None else self.choices[choice].tokens
        cached = sum(stream.num_cached_tokens for stream in streams)
        details = PromptDetails(cached) if self.state.config.enable_prompt_tokens_details else None
        return Usage(prompt, done, prompt + done, details)

    async def _one(self, number: int) -> AsyncGenerator[tuple[int, Delta]]:
        first = number * self.params.n
        stream = await self.state.llm.open(self.prompts[number], self.params, priority=self.priority, salt=self.salt)
        self.streams[number] = stream
        try:
            self._count_scored(len(stream.prompt_token_ids), self.params.prompt_logprobs)
            while not stream.finished:
                for delta in await stream.next():
                    yield first + delta.index, _without_tokens(delta) if self.prompt_only else delta
        finally:
            stream.close()

    async def _merged(self) -> AsyncGenerator[tuple[int, Delta]]:
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._feed(number, queue)) for number in range(len(self.prompts))]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, number: int, queue: asyncio.Queue[tuple[int, Delta] | Exception | None]) -> None:
        try:
            async with aclosing(self._one(number)) as deltas:
                async for item in deltas:
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    def _count_scored(self, tokens: int, top: int | None) -> None:
        """Raises RequestError when there are too many."""
        self._scored += 0 if top is None else tokens * (1 + top)
        if self._scored > MAX_SCORED:
            raise RequestError(
                f"these are more than {MAX_SCORED:,} log-probabilities, alternatives included: send fewer prompts, or "
                "ask for fewer tokens, completions or alternatives", "logprobs")  # fmt: skip

    def note(self, choice: int, delta: Delta) -> None:
        """Count what is new. Raises EngineError for a completion that failed, RequestError for too many numbers."""
        entry = self.choices[choice]
        if delta.token_ids:
            now = time.monotonic()
            if entry.last_at:
                self.state.metrics.inter_token_latency.observe((now - entry.last_at) / len(delta.token_ids))
            entry.last_at = now
            entry.tokens += len(delta.token_ids)
            if delta.logprobs is not None:
                self._count_scored(len(delta.token_ids), self.params.logprobs)
        if delta.finish_reason is not None:
            entry.finish_reason, entry.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason == "error":
            raise EngineError("the model gave numbers that are not finite for this request")


def account(job: Job) -> None:
    """Count an ended job, however it ended."""
    metrics = job.state.metrics
    seconds = time.monotonic() - job.began
    metrics.e2e_latency.observe(seconds)
    for stream in job.streams.values():
        metrics.prompt_tokens.observe(len(stream.prompt_token_ids))
        times = stream.metrics
        if times.queue_seconds is not None:
            metrics.queue_time.observe(times.queue_seconds)
        if times.time_to_first_token is not None:
            metrics.time_to_first_token.observe(times.time_to_first_token)
        metrics.observe_request(times, job.params.n, len(stream.prompt_token_ids) - stream.num_cached_tokens)
    reasons = [entry.finish_reason or "abort" for entry in job.choices]
    if job.params.max_tokens is not None:
        metrics.params_max_tokens.observe(job.params.max_tokens)
    metrics.max_generation_tokens.observe(max(entry.tokens for entry in job.choices))
    for entry, reason in zip(job.choices, reasons, strict=True):
        metrics.generation_tokens.observe(entry.tokens)
        metrics.finished[reason] += 1
    what = generated(job, reasons)
    if job.call.span is not None:
        job.call.span.generated(what)
    if job.state.config.enable_log_requests:
        log_request(what, seconds, job.call.trace_id)


def generated(job: Job, reasons: Sequence[str]) -> Generated:
    streams = job.streams.values()
    return Generated(
        identity=job.call.identity,
        model=job.call.model,
        label=job.call.label,
        streamed=job.streamed,
        params=job.params,
        times=[stream.metrics for stream in streams],
        prompt_tokens=sum(len(stream.prompt_token_ids) for stream in streams),
        cached_tokens=sum(stream.num_cached_tokens for stream in streams),
        generation_tokens=sum(choice.tokens for choice in job.choices),
        reasons=reasons,
    )


class EventStream:
    """The ASGI app that streams one job.

    Nothing is sent before the first token is there: what goes wrong until then gets a truthful status.
    """

    def __init__(
        self, job: Job, chunks: Chunks, *, include_usage: bool, every_usage: bool, echo: list[str],
        extras: Extras | None = None,
    ) -> None:  # fmt: skip
        self._job = job
        self._extras = extras
        self._chunks = chunks
        self._include_usage = include_usage
        self._every_usage = every_usage
        self._echo = dict(enumerate(text for text in echo for _ in range(job.params.n)))
        self._started = False
        self._outlet: Outlet | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._job.choices) == 1 and self._extras is None:
            self._outlet = scope.get(SCOPE_KEY)
        try:
            await self._job.call.while_wanted(self._pump(send), self._job.deadline)
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            answer: ApiError = to_api_error(error)
            self._job.call.failed(answer.code, answer.status)
            await write(send, error_event(answer.encode()), more=False)

    async def _pump(self, send: Send) -> None:
        chunks = self._chunks
        async with aclosing(self._job.deltas()) as deltas:
            async for choice, delta in deltas:
                data = self._chunk(choice, delta)
                if not self._started:
                    data = await self._open(send) + data
                if data:
                    await write(send, data)
                if self._outlet is not None:
                    self._job.stream_of(0).at_once = self._at_once
        if not self._started:
            await self._open(send)
        end = chunks.usage(self._job.usage()) if self._include_usage else b""
        await write(send, end + DONE, more=False)

    def _at_once(self) -> bool:
        """Send what the engine has just told, if it is only more text: waking the task costs more than all of that."""
        stream, outlet = self._job.stream_of(0), self._outlet
        assert outlet is not None
        if stream.ended or not outlet.takes():
            return False
        for delta in stream.take():
            self._job.note(0, delta)
            outlet.put(self._chunk(0, delta))
        return True

    def _chunk(self, choice: int, delta: Delta) -> bytes:
        usage = self._job.usage(choice) if self._every_usage else None
        before = self._prompt(choice) if choice in self._echo else b""
        extra = PLAIN if self._extras is None else self._extras.of(choice, delta)
        if delta.finish_reason is not None:
            last = self._chunks.last(choice, delta.text, delta.finish_reason, delta.stop_reason, usage, extra)
            return before + last
        if delta.text or delta.token_ids:  # a token without text is news too: clients time their tokens by events
            return before + self._chunks.text(choice, delta.text, usage, extra)
        return before

    def _prompt(self, choice: int) -> bytes:
        """The chunk with the choice's prompt, which comes in front of its first token."""
        extra = PLAIN if self._extras is None else self._extras.echoed(choice)
        return self._chunks.text(choice, self._echo.pop(choice), None, extra)

    async def _open(self, send: Send) -> bytes:
        """Send the head of the response; returns the events that come before the first token's."""
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True
        extras = self._extras
        return b"".join(
            self._chunks.opening(index, PLAIN if extras is None else extras.opening(index))
            for index in range(len(self._job.choices))
        )


async def write(send: Send, data: bytes, more: bool = True) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError:
        raise ClientGone from None


def _without_tokens(delta: Delta) -> Delta:
    """How it ended is not shown either, for nothing was asked to begin; a failure stays one."""
    if delta.finish_reason == "stop":
        delta = delta._replace(finish_reason="length", stop_reason=None)
    return delta._replace(text="", token_ids=[], logprobs=None)


def _salt(tenant: str, salt: str | None) -> str:
    """What separates this caller's prefix cache from others'. The tenant comes from the key, never from the body."""
    return f"{tenant}:{salt}" if tenant or salt else ""
