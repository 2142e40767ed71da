"""AsyncLLM: many requests at once on one engine, for asyncio programs and for the HTTP server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic_ns
from typing import Any, Self, TypeVar

from gapless.base.config import DEMO_MODEL, EngineConfig
from gapless.base.errors import EngineDeadError, QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import NO_TRANSFER, KVTransfer, PageEvent
from gapless.engine import messages as m
from gapless.engine.arguments import make_config, one_engine
from gapless.engine.backend import MessageBackend, dead
from gapless.engine.build import build_core
from gapless.engine.frontdoor import ModelAssets, locate, open_assets
from gapless.engine.inputs import PromptInput, Resolver, check_adapter, check_request_id
from gapless.engine.outputs import Delta, RequestOutput
from gapless.engine.seam import AdapterChange, EngineInfo, OperatorOrder, Sink
from gapless.engine.stats import Stats
from gapless.engine.stream import OutputStream, TokenSink
from gapless.engine.thread_backend import ThreadBackend
from gapless.engine.trace import RequestRecord
from gapless.engine.tracker import Tracker
from gapless.engine.watch import StepWatcher
from gapless.text.replies import last_words
from gapless.text.tokenizer import Tokenizer

log = logging.getLogger("gapless.engine")

INLINE_CHARS = 4_096
"""Longer prompts are tokenised on a thread, so that they do not delay the tokens of other requests."""
POOL_THREADS = 2

PAUSE_MODES = ("abort", "wait", "keep")

T = TypeVar("T")

OnPageEvents = Callable[[Sequence[PageEvent]], None]


class AsyncLLM:
    """A running engine for asyncio.

        async with AsyncLLM.from_config(EngineConfig(model="demo")) as llm:
            async for output in llm.generate("1 + 1 =", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    All methods belong to the asyncio loop that called `start`. `front` is the model's tokenizer, end-of-sequence ids
    and default sampling parameters; `seed` gives seeds to requests without one.
    """

    def __init__(
        self, backend: MessageBackend, front: ModelAssets, *, seed: int = 0, config: EngineConfig | None = None
    ) -> None:
        self.backend = backend
        self.front = front
        self.config = config
        self.watches = [StepWatcher(one) for one in backend.engines]
        """The steps of each engine"""
        self._take_page_events: Sequence[OnPageEvents] = ()
        self.abort_others: Callable[[], Awaitable[int]] = _no_others
        """Ends the open requests of other processes with the same engine; returns their number."""
        self._seed = seed
        self._idle = asyncio.Event()
        self._steady = asyncio.Event()
        """Set unless an engine that died is being followed by another"""
        self._steady.set()
        self._tracker = Tracker(front.tokenizer, backend.abort, self._idle.set)
        self.resolver: Resolver | None = None
        self._draining = False
        self._closed = False
        self._start: asyncio.Future[None] | None = None
        self._names = itertools.count(1)
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="gapless-text")

    @classmethod
    def from_config(cls, config: EngineConfig, backend: MessageBackend | None = None) -> Self:
        """Return an engine on a thread of this process, or on the given backend.

        A model named by its hub name is fetched before this returns. Raises CheckpointError, ConfigError, and
        ServerError if the hub cannot be reached.
        """
        located, commit = locate(config if backend else one_engine(config))
        backend = backend or ThreadBackend(partial(build_core, located))
        return cls(backend, open_assets(located, commit), seed=config.base_seed, config=config)

    @classmethod
    def from_engine_args(cls, args: Mapping[str, Any] | EngineConfig | None = None, /, **options: Any) -> Self:
        """Make an engine from the fields of EngineConfig, as a mapping, as keywords, or both."""
        if isinstance(args, EngineConfig):
            return cls.from_config(args)
        merged = {**(args or {}), **options}
        return cls.from_config(make_config(merged.pop("model", DEMO_MODEL), merged))

    # Life

    async def start(self) -> None:
        """Return when the engine accepts requests; raises if it cannot start. May be called again."""
        if self._start is None:
            self._start = asyncio.ensure_future(self._bring_up())
        await asyncio.shield(self._start)

    async def _bring_up(self) -> None:
        sink = Sink(
            started=self._tracker.on_started,
            tokens=self._tracker.on_tokens,
            refused=self._tracker.fail,
            steps=lambda steps, engine: self.watches[engine].on_steps(steps),
            page_events=self._on_page_events,
            died=self._on_death,
            broke=self._on_break,
            came_up=self._on_up,
        )
        await self.backend.start(sink)
        self.resolver = Resolver(self.front, self.backend.info, self._seed)

    def _on_death(self, error: Exception) -> None:
        self._steady.set()
        self._tracker.fail_all(lambda: dead(error))

    def _on_break(self, error: Exception, keys: Collection[int] | None, engine: int) -> None:
        if not self.backend.ready():
            self._steady.clear()
        waiting, lost = self._tracker.suspend(lambda: dead(error), keys)
        if waiting or lost:
            text = "%d open requests wait for the next engine; %d were open when the one before died too, and end"
            log.warning(text, waiting, lost)
        self.watches[engine].log.clear()  # the next engine numbers its steps from the start

    def _on_up(self) -> None:
        self._steady.set()
        if requests := self._tracker.resume():
            log.warning("%d sequences continue on another engine", len(requests))
        for request in requests:
            self.backend.submit(request)

    def send_page_events(self, *take: OnPageEvents) -> None:
        """Call these on this loop with each change of the prefix index of their engine. Call this before `start`."""
        assert self._start is None, "page events are asked for before the start"
        self._take_page_events = take
        self.backend.send_page_events()

    def _on_page_events(self, events: Sequence[PageEvent], engine: int) -> None:
        if self._take_page_events:
            self._take_page_events[engine](events)

    async def close(self) -> None:
        """End every open request with EngineDeadError, then the engine."""
        self._closed = True
        self._steady.set()
        if self._start is not None:
            self._start.cancel()
        self._tracker.fail_all(lambda: EngineDeadError("the engine was closed"))
        self.backend.forsake(lambda: EngineDeadError("the engine was closed"))
        await self.backend.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def drain(self, timeout: float) -> bool:  # noqa: ASYNC109 (the answer is False, not an exception)
        """Take no more requests and wait for the open ones, at most `timeout` seconds. True if all have ended."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while self._tracker.requests:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # Requests

    async def open(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        sink: TokenSink | None = None,
        arrival: int | None = None,
        transfer: KVTransfer = NO_TRANSFER,
        prompt_only: bool = False,
        label: str = "",
        interval: int = 0,
        engine: int | None = None,
        patient: Callable[[], bool] = lambda: False,
    ) -> OutputStream:
        """Check and submit a request. Raises RequestError, QueueFullError (draining) or EngineDeadError.

        Without `params`, the model's own defaults. A request id already open is refused. The first request starts the
        engine if `start` was not called. `adapter` is one of `info.adapters`. New text goes to the `sink` while it
        accepts it, else to the stream's reader. Times count from `arrival`, monotonic nanoseconds, or from this call.
        `transfer` is for engines with a role. With `prompt_only` the prompt may fill the whole context; one token is
        sampled beyond it. `label` is another name, shown by `latest_requests`, not necessarily unique. `interval` is
        the most tokens of a Delta, `engine` the number of one of several engines. A call that is `patient` waits while
        an engine that died is followed by another.
        """
        arrival = monotonic_ns() if arrival is None else arrival
        if self.resolver is None and not self._closed:
            await self.start()
        if patient():
            await self._steady.wait()
        resolver = self._check_up()
        check_adapter(adapter, self.info.adapters)
        params = params or self.get_default_sampling_params()
        name = self._name(request_id)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        resolve = partial(
            resolver.resolve, prompt, params, priority=priority, salt=salt, adapter=adapter, transfer=transfer,
            prompt_only=prompt_only,
        )  # fmt: skip
        slow = isinstance(text, str) and len(text) > INLINE_CHARS
        resolved = await self.in_pool(resolve) if slow else resolve()
        if patient():
            await self._steady.wait()
        self._check_up()
        self._check_free(name)
        stream = OutputStream(name, resolved, self._tracker, arrival, sink, label, interval)
        self._tracker.open(stream)
        for child in resolved.requests:
            self.backend.submit(child, engine)
        return stream

    async def stream(
        self, prompt: PromptInput, params: SamplingParams | None = None, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Yield new text and tokens, completion by completion. Closing or cancelling the iterator aborts the
        request."""
        stream = await self.open(prompt, params, request_id, **options)
        try:
            while not stream.finished:
                for delta in await stream.next():
                    yield delta
        finally:
            stream.close()

    async def generate(
        self, prompt: PromptInput, params: SamplingParams | None = None, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yield the whole output so far after each change; the last one is `finished`. A slow reader skips intermediate
        ones. Closing or cancelling the iterator aborts the request. `options` are priority, salt and adapter."""
        stream = await self.open(prompt, params, request_id, **options)
        try:
            while not stream.finished:
                await stream.next()
                yield stream.snapshot()
        finally:
            stream.close()

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests with finish reason "abort". Unknown ids are ignored: they may have ended."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._tracker.abort(name)

    async def abort_all(self) -> int:
        """End every open request with finish reason "abort"; return their number."""
        own = sum([self._tracker.abort(name) for name in list(self._tracker.requests)])
        return own + await self.abort_others()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold requests until `resume_generation`; return when none runs any more.

        `mode` is for open requests: "abort" ends them, "wait" lets them finish, and "keep" freezes them. Then the
        prefix cache is emptied, except with "keep" or if `clear_cache` is false. New requests wait in the engine's
        queue, up to its limit. Raises RequestError, EngineDeadError, QueueFullError while draining.
        """
        self._check_up()
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be {', '.join(PAUSE_MODES)}, got {str(mode)[:40]!r}", "mode")
        self.backend.paused = OperatorOrder.FREEZE if mode == "keep" else OperatorOrder.HOLD
        held = asyncio.ensure_future(self.backend.ask(partial(m.Operate, order=self.backend.paused)))
        await asyncio.sleep(0)  # send the order before the aborts
        if mode == "abort":
            await self.abort_all()
        await held
        if clear_cache and mode != "keep":
            await self.reset_prefix_cache()

    async def resume_generation(self) -> None:
        """Resume the requests that a pause holds. Harmless without one."""
        self._up()
        self.backend.paused = None
        await self.backend.ask(partial(m.Operate, order=OperatorOrder.RESUME))

    async def is_paused(self) -> bool:
        """Return whether a pause holds requests, or is beginning."""
        return self.backend.paused is not None

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache on the device and in the host tier: no request finds an earlier page.

        Running requests keep their pages. Tiers below and peers keep theirs. Returns True: it always succeeds.
        """
        self._up()
        await self.backend.ask(partial(m.Operate, order=OperatorOrder.FORGET))
        return True

    async def change_adapter(self, change: AdapterChange) -> None:
        """Load an adapter from below `EngineConfig.lora_dir`, or unload one; open requests keep theirs.

        A name in use for other files is refused unless the change is in place. A restarted engine has the adapters of
        `lora_modules` again. Raises RequestError for a refusal, EngineDeadError, QueueFullError while draining.
        """
        self._check_up()
        await self.backend.ask(partial(m.ChangeAdapter, change=change))

    async def update_weights(self, path: str) -> None:
        """Replace the model's weights by a directory's, of the same architecture, while the engine runs.

        Open requests end with the old weights, later ones wait for the new ones, and find no KV of the old. An update
        continues if its caller stops waiting. A restarted engine loads the new weights again; dtype, tokenizer,
        end-of-sequence ids and all else stay as at the start. Raises RequestError for a refusal, which changes nothing,
        EngineDeadError, QueueFullError while draining.
        """
        self._check_up()
        await self.backend.ask(partial(m.UpdateWeights, path=path))

    # Text

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the prompt of a conversation, ready for `generate`; options as in ChatTemplate.render. On a thread."""
        return await self.in_pool(lambda: chat_prompt(self._up(), messages, **options))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids, on a thread. Raises RequestError for text far longer than the context."""
        return await self.in_pool(lambda: self._up().encode(text, add_special_tokens))

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run text work on one of this engine's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.front.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.front.tokenizer

    def get_default_sampling_params(self, **otherwise: Any) -> SamplingParams:
        """Return the parameters recommended by the model's generation_config.json, `otherwise` for the rest."""
        return SamplingParams(**{**otherwise, **self.front.defaults})

    # State

    @property
    def watch(self) -> StepWatcher:
        """The steps of the first engine."""
        return self.watches[0]

    @property
    def info(self) -> EngineInfo:
        return self.backend.info

    @property
    def started(self) -> bool:
        """Return whether the engine has started; it may have stopped since."""
        return self.resolver is not None

    @property
    def is_ready(self) -> bool:
        """Return whether a request would be accepted now."""
        return self.resolver is not None and self.backend.ready() and not (self._draining or self._closed)

    @property
    def open_requests(self) -> int:
        return len(self._tracker.requests)

    def stats(self) -> Stats:
        return self.backend.stats()

    @property
    def detok_seconds(self) -> float:
        """Total time of turning tokens into text."""
        return self._tracker.detok_ns / 1e9

    def latest_requests(self, limit: int) -> list[RequestRecord]:
        """Return the newest requests, open and ended, newest last; at most 500 ended ones are kept."""
        return self._tracker.latest(limit)

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine cannot work."""
        if self._closed or self.resolver is None or not self.backend.ready():
            raise EngineDeadError("the engine is not running")

    def _up(self) -> Resolver:
        if self._closed or self.resolver is None:
            raise EngineDeadError("the engine was closed" if self._closed else "the engine is not started")
        return self.resolver

    def _check_up(self) -> Resolver:
        resolver = self._up()
        if not self.backend.ready():
            raise EngineDeadError("the engine is not running")
        if self._draining:
            raise QueueFullError("the engine is draining and takes no new requests")
        return resolver

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            while (name := f"request-{next(self._names)}") in self._tracker.requests:
                pass  # a client took that name
            return name
        check_request_id(request_id)
        self._check_free(request_id)
        return request_id

    def _check_free(self, name: str) -> None:
        if name in self._tracker.requests:
            raise RequestError(f"request_id {name!r} is open already", "request_id", "duplicate_request_id")


async def _no_others() -> int:
    return 0


def chat_prompt(resolver: Resolver, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """Return {"prompt": text, "prompt_token_ids": ids, "last_words": its end}. The template writes special tokens
    itself; `add_special_tokens` adds the tokenizer's too."""
    special = options.pop("add_special_tokens", False)
    text = resolver.tokenizer.chat(messages, **options)
    last = last_words(text, messages, bool(options.get("continue_final_message")))
    return {"prompt": text, "prompt_token_ids": resolver.encode(text, special), "last_words": last}
