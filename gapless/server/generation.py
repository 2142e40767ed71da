"""A generation request of any dialect: several prompts, several completions, streamed or whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gapless.base.errors import EngineError, QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.engine.inputs import PromptInput
from gapless.engine.outputs import Delta, TokenLogprobs
from gapless.engine.stream import OutputStream, TokenSink
from gapless.server.endpoint import HttpCall
from gapless.server.kv_transfer import read_handover
from gapless.server.limits import label_of
from gapless.server.logs import log_request
from gapless.server.protocol import MAX_SEQUENCES, GenerationRequest
from gapless.server.state import new_id
from gapless.server.tracing import Generated
from gapless.text.items import Change, Items
from gapless.text.replies import ReplyReader
from gapless.text.reply_parser import Content, ReplyEvent

MAX_SCORED = 4_000_000
"""Log-probabilities of one request, prompts, choices and alternatives together: they stay in memory until its end."""

RANK_HEADER = "X-data-parallel-rank"
"""The header that names one of several engines, in vLLM too"""


@dataclass(slots=True)
class Progress:
    """State of a completion."""

    items: Items = field(default_factory=Items)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_at: float = 0.0


class Job:
    """A checked request, ready to run. The choice of prompt p and completion i is p * n + i.

    With `prompt_only` no generated text is shown or counted.
    """

    def __init__(
        self,
        call: HttpCall,
        request: GenerationRequest,
        prompts: Sequence[PromptInput],
        params: SamplingParams,
        prompt_only: bool = False,
    ) -> None:
        if len(prompts) * params.n > MAX_SEQUENCES:
            raise RequestError(f"prompts times n must be at most {MAX_SEQUENCES} sequences", "n")
        self.state = call.state
        self.call = call
        self.prompts = prompts
        self.params = params
        self.prompt_only = prompt_only
        self._request_id = request.request_id or ""
        self.streamed = bool(request.stream)
        self.interval = self.state.config.stream_interval or 0 if self.streamed else 0
        call.label = call.label or label_of(request.request_id or "")
        _check_logprobs(params, self.state.config.max_logprobs, request.LOGPROBS)
        self.shows_ids = bool(request.return_token_ids)
        self.shows_times, self.shows_meta = bool(request.timings_per_token), bool(request.return_meta_info)
        self.weights = ""
        """The version of the weights, after the first token"""
        at_end, self.usage_in_each = request.usage_wanted()
        self.usage_at_end = at_end or self.state.config.enable_force_include_usage
        """Whether a stream ends with a chunk of usage"""
        self.priority = request.priority or 0
        self.salt = _salt(call.tenant, request.cache_salt)
        self.adapter = self.state.adapter_of(request.model or "")
        asked = request.kv_transfer_params if len(prompts) == 1 else None  # a router sends them with several too
        self.engine = _engine_of(call)
        self.handover = read_handover(asked, self.state.peers, new_id("kv"))
        self.choices = [Progress() for _ in range(len(prompts) * params.n)]
        self.left = len(self.choices)
        """Completions that have not ended."""
        self.streams: dict[int, OutputStream] = {}
        self.begun: set[int] = set()
        """Prompts with a first token"""
        self.readers: dict[int, ReplyReader] = {}
        """The parser of a choice, if replies are more than text"""
        self.scored = 0
        """Log-probabilities so far, alternatives included"""

    async def deltas(self, sink: TokenSink | None = None) -> AsyncGenerator[tuple[int, Delta]]:
        """(choice, delta) in the order they come, less what the `sink` of the only choice takes and notes itself.
        Closing the iterator aborts what still runs. A request that is refused before its first token is not counted as
        one that ran.
        """
        refused = False
        self.state.jobs.add(self)
        try:
            async with aclosing(self._one(0, sink) if len(self.prompts) == 1 else self._merged()) as deltas:
                async for choice, delta in deltas:
                    self.note(choice, delta)
                    yield choice, delta
        except (RequestError, QueueFullError):
            refused = not any(entry.tokens for entry in self.choices)
            raise
        finally:
            self.state.jobs.discard(self)
            if self.streams and not refused:
                account(self)

    @property
    def ids(self) -> set[str]:
        return {self.call.identity, self.call.label, self._request_id, *self.names} - {""}

    @property
    def names(self) -> list[str]:
        return [stream.request_id for stream in self.streams.values()]

    def keep(self, choice: int, delta: Delta) -> None:
        """Add new tokens to what a whole answer shows of the choice beside its items."""
        entry = self.choices[choice]
        entry.token_ids += delta.token_ids
        entry.logprobs += delta.logprobs or ()

    def changes(self, choice: int, delta: Delta) -> list[Change]:
        """Add new tokens to the choice's items, and return what changes."""
        items = self.choices[choice].items
        changes = items.take(self.events_of(choice, delta))
        return changes if delta.finish_reason is None else changes + items.close()

    def events_of(self, choice: int, delta: Delta) -> list[ReplyEvent]:
        """Return the new part as events: if replies are no more than text, all is content."""
        if (reader := self.readers.get(choice)) is None:
            return [Content(delta.text)] if delta.text else []
        events = reader.feed(delta.token_ids, delta.text)
        return events + (reader.finish() if delta.finish_reason is not None else [])

    def stream_of(self, choice: int) -> OutputStream:
        """Return the engine's request of a choice. It exists once a Delta of it does."""
        return self.streams[choice // self.params.n]

    def usage(self, choice: int | None = None) -> dict[str, Any]:
        """Token counts so far, of one choice or of all."""
        streams = list(self.streams.values()) if choice is None else [self.streams[choice // self.params.n]]
        prompt = sum(len(stream.prompt_token_ids) for stream in streams)
        done = sum(c.tokens for c in self.choices) if choice is None else self.choices[choice].tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        if self.state.config.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(stream.num_cached_tokens for stream in streams)}
        if self.readers:
            readers = self.readers.values() if choice is None else [self.readers[choice]]
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(each.reasoning_tokens for each in readers)}
        return usage

    def timings(self, choice: int | None = None) -> dict[str, Any]:
        """Return llama.cpp's timings and the time in the queue: of a choice's prompt, or of the one that ended last."""
        streams = self.streams.values() if choice is None else [self.stream_of(choice)]
        stream = max(streams, key=lambda each: each.last_token)
        times, cached = stream.metrics, stream.num_cached_tokens
        parts = (
            ("prompt", len(stream.prompt_token_ids) - cached, times.prefill_seconds),
            ("predicted", times.generation_tokens, times.generation_seconds),
        )
        made: dict[str, Any] = {"cache_n": cached, "queue_ms": 1e3 * (times.queue_seconds or 0.0)}
        for name, tokens, seconds in parts:
            taken = seconds or 0.0
            made |= {f"{name}_n": tokens, f"{name}_ms": 1e3 * taken}
            made[f"{name}_per_token_ms"] = 1e3 * taken / tokens if tokens else 0.0
            made[f"{name}_per_second"] = tokens / taken if taken else 0.0
        return made

    def meta_info(self, choice: int) -> dict[str, Any]:
        """Return SGLang's meta_info of a choice."""
        stream, done = self.stream_of(choice), self.choices[choice]
        return {
            "id": self.call.identity,
            "weight_version": self.weights,
            "finish_reason": {"type": done.finish_reason},
            "prompt_tokens": len(stream.prompt_token_ids),
            "cached_tokens": stream.num_cached_tokens,
            "completion_tokens": done.tokens,
            "e2e_latency": (time.monotonic_ns() - self.call.arrived) / 1e9,
        }

    async def _one(self, number: int, sink: TokenSink | None = None) -> AsyncGenerator[tuple[int, Delta]]:
        first = number * self.params.n
        stream = await self.state.llm.open(
            self.prompts[number],
            self.params,
            f"{self.call.identity}-{number}" if len(self.prompts) > 1 else self.call.identity,
            priority=self.priority,
            salt=self.salt,
            adapter=self.adapter,
            sink=None if self.interval else sink,
            label=self.call.label,
            interval=self.interval,
            arrival=self.call.arrived,
            transfer=self.handover.transfer,
            prompt_only=self.prompt_only,
            engine=self.engine,
            patient=lambda: bool(self.streams),
        )
        self.streams[number] = stream
        try:
            self._count_scored(len(stream.prompt_token_ids), self.params.prompt_logprobs)
            while not stream.finished:
                deltas = await stream.next()
                self.weights = self.weights or self.state.weight_version
                for delta in deltas:
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
            await self.state.turnstile.enter()
            async with aclosing(self._one(number)) as deltas:
                async for item in deltas:
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    def _count_scored(self, tokens: int, top: int | None) -> None:
        """Raises RequestError when there are too many."""
        self.scored += 0 if top is None else tokens * (1 + top)
        if self.scored > MAX_SCORED:
            raise RequestError(
                f"these are more than {MAX_SCORED:,} log-probabilities, alternatives included: send fewer prompts, or "
                "ask for fewer tokens, completions or alternatives",
                "logprobs",
            )

    def _note_start(self, number: int) -> None:
        """Count a prompt's wait for its first token, once, however many completions it has."""
        if number not in self.begun:
            self.begun.add(number)
            self.state.metrics.observe_start(self.streams[number].metrics)

    def note(self, choice: int, delta: Delta) -> None:
        """Count new tokens. Raises EngineError for a completion that failed, RequestError for too many numbers."""
        entry = self.choices[choice]
        if delta.token_ids:
            now = time.monotonic()
            if not entry.last_at:
                self._note_start(choice // self.params.n)
            else:
                self.state.metrics.inter_token_latency.observe((now - entry.last_at) / len(delta.token_ids))
            entry.last_at = now
            entry.tokens += len(delta.token_ids)
            if delta.logprobs is not None:
                self._count_scored(len(delta.token_ids), self.params.logprobs)
        if delta.finish_reason is not None:
            entry.finish_reason, entry.stop_reason = delta.finish_reason, delta.stop_reason
            self.left -= 1
        if delta.finish_reason == "error":
            raise EngineError("the model gave numbers that are not finite for this request")


def account(job: Job) -> None:
    """Count a job that the engine took, however it ended."""
    metrics = job.state.metrics
    metrics.params_n.observe(job.params.n)
    seconds = (time.monotonic_ns() - job.call.arrived) / 1e9
    metrics.e2e_latency.observe(seconds)
    metrics.by_adapter.update([job.adapter] if job.adapter else ())
    for number, stream in job.streams.items():
        if stream.deaths:
            metrics.resumed["lost" if stream.failed else "finished" if stream.finished else "aborted"] += 1
        metrics.prompt_tokens.observe(len(stream.prompt_token_ids))
        times = stream.metrics
        if number not in job.begun:
            metrics.observe_start(times)
        metrics.observe_request(times, job.params.n, len(stream.prompt_token_ids) - stream.num_cached_tokens)
    reasons = [entry.finish_reason or "abort" for entry in job.choices]
    if job.params.max_tokens is not None:
        metrics.params_max_tokens.observe(job.params.max_tokens)
    metrics.max_generation_tokens.observe(max(entry.tokens for entry in job.choices))
    for entry, reason in zip(job.choices, reasons, strict=True):
        metrics.generation_tokens.observe(entry.tokens)
        metrics.finished[reason] += 1
    span, logged = job.call.span, job.state.config.enable_log_requests
    if span is None and not logged:
        return
    streams = job.streams.values()
    what = Generated(
        identity=job.call.identity,
        model=job.call.model,
        label=job.call.label,
        streamed=job.streamed,
        params=job.params,
        arrived=job.call.arrived,
        times=[stream.metrics for stream in streams],
        prompt_tokens=sum(len(stream.prompt_token_ids) for stream in streams),
        cached_tokens=sum(stream.num_cached_tokens for stream in streams),
        generation_tokens=sum(choice.tokens for choice in job.choices),
        reasons=reasons,
    )
    if span is not None:
        span.generated = what
    if logged:
        log_request(what, seconds, job.call.trace_id)


def _without_tokens(delta: Delta) -> Delta:
    """How it ended is not shown either, for nothing was asked to begin; a failure stays one."""
    if delta.finish_reason == "stop":
        delta = delta._replace(finish_reason="length", stop_reason=None)
    return delta._replace(text="", token_ids=[], logprobs=None)


def _check_logprobs(params: SamplingParams, most: int, field: str) -> None:
    """Raise RequestError for more than --max-logprobs; `field` asks for sampled tokens."""
    asked = {field: params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, top in asked.items():
        if top is not None and top > most:
            raise RequestError(f"{name} must be at most {most} here (--max-logprobs), got {top}", name)


def _engine_of(call: HttpCall) -> int | None:
    """Return the number of the engine that a client chose, as it does for vLLM. Raises RequestError."""
    given, engines = call.request.headers.get(RANK_HEADER), len(call.state.llm.backend.engines)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and int(given[:9]) < engines and len(given) < 10):
        raise RequestError(f"{RANK_HEADER} must be from 0 to {engines - 1}, got {given[:40]!r}", RANK_HEADER)
    return int(given)


def _salt(tenant: str, salt: str | None) -> str:
    """Return the salt of this caller's prefix cache. The tenant comes from the key, never from the body."""
    return f"{tenant}:{salt or ''}" if tenant or salt else ""
