"""State that all handlers share: the engine, its tokenizer, the settings, the metrics, and whether work is taken."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from gapless.base.errors import ConfigError, QueueFullError, RequestError
from gapless.base.peers import PeerPlan
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.seam import EngineView
from gapless.engine.trace import RequestRecord
from gapless.server.config import ServerConfig
from gapless.server.errors import draining, engine_down, model_not_found, unavailable
from gapless.server.metrics import Metrics
from gapless.server.samples import SampleLog
from gapless.server.tracing import Tracing
from gapless.server.turnstile import Turnstile
from gapless.text.replies import ReplyForms

T = TypeVar("T")

MAX_TRACES = 2
PAGES_SECONDS = 0.2
"""The page map is made at most so often, however many ask."""
MAX_TEXT_JOBS = 512
"""Requests whose text is being made into tokens, or waits for that; more are refused."""


class OpenJob(Protocol):
    """A generation request that the engine has or is about to get, as others find it."""

    @property
    def ids(self) -> set[str]:
        """Name for clients and logs."""

    @property
    def names(self) -> list[str]:
        """Return the names of its requests in the engine."""


class OtherFronts:
    """The further fronts of a server, the processes that answer beside its first: none."""

    open = detok_ns = 0
    """Their open generation requests, and the time of turning their tokens into text"""
    pids: tuple[int, ...] = ()

    async def abort(self, ids: Sequence[str] = ()) -> int:
        """End their open requests with these ids, or all; return their number."""
        return 0

    async def latest(self, limit: int) -> list[RequestRecord]:
        """Return the newest `limit` requests of each."""
        return []

    def name_weights(self, version: str) -> None:
        """Pass on the weights' name in answers."""


class ServerState:
    """State of a server. All methods run on the event loop's thread."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, model_name: str, tracing: Tracing | None = None) -> None:
        self.llm = llm
        self.config = config
        self.model_names = config.served_model_name or (model_name,)
        self._first_adapters: tuple[str, ...] = tuple(llm.config.adapters) if llm.config else ()
        for name in self._first_adapters:
            if name in self.model_names:
                raise ConfigError(f"lora_modules: {name!r} is a name of the model itself: give the adapter another")
        self.template_variables = config.template_variables()
        if self.template_variables and llm.tokenizer.template is not None:
            try:
                llm.tokenizer.template.check_variables(self.template_variables)
            except RequestError as error:
                raise ConfigError(f"default_chat_template_kwargs: {error}") from error
        self.peers = llm.config.peer_plan if llm.config else PeerPlan()
        """Engines that give each other pages, if this one has any"""
        self.weight_version = "default"
        """The weights' name in answers; an update gives them another."""
        self.metrics = Metrics(self.model_names[0], len(llm.backend.engines))
        self.samples = SampleLog(self.metrics)
        self.replies = ReplyForms(llm.tokenizer, config.tool_call_parser, config.reasoning_parser)
        self.others = OtherFronts()
        self.stopping = False
        """No new work is taken."""
        self.closed = False
        """The time to drain is over."""
        self.open = 0
        """Generation requests that have not ended."""
        self.jobs: set[OpenJob] = set()
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()
        self.turnstile = Turnstile()
        self.debug = Debug()
        self.tracing = tracing
        self._limits: set[asyncio.Timeout] = set()
        self.text_jobs = asyncio.Semaphore(MAX_TEXT_JOBS)

    def check_open(self, explains: bool = False) -> None:
        """Raise ApiError 503 when new work is not taken now; one that `explains` has the last words of a dead engine,
        which are for operators."""
        if self.stopping:
            raise draining()
        if not self.llm.started:
            raise unavailable("the model is loading", "loading")
        if not self.llm.is_ready:
            raise engine_down(self.llm.backend.last_death if explains else None)

    def admit(self, model: str | None) -> str:
        """The model's name in the answer. Raises ApiError when no work is taken or the model is not served here."""
        self.check_open()
        if model is None or model in self.names:
            return model or self.model_names[0]
        raise model_not_found(self.names)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of adapters, which requests give as their model."""
        return self.llm.info.adapters if self.llm.started else self._first_adapters

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a request may give as its model: the model's, and the adapters'."""
        return self.model_names + self.adapters

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a name of `names` stands for; empty for the model alone."""
        return model if model in self.adapters else ""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a generation request as open, from its arrival to the end of its answer."""
        self.open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self.idle.set()

    @contextmanager
    def open_limit(self, deadline: float | None) -> Iterator[asyncio.Timeout]:
        """A time limit that also passes when the server closes."""
        limit = asyncio.timeout_at(0.0 if self.closed else deadline)
        self._limits.add(limit)
        try:
            yield limit
        finally:
            self._limits.remove(limit)

    def jobs_of(self, ids: Sequence[str]) -> list[OpenJob]:
        """Return the open jobs that clients know by one of these ids."""
        return [job for job in self.jobs if not job.ids.isdisjoint(ids)]

    async def abort_named(self, ids: Sequence[str]) -> int:
        """End this front's open jobs that clients know by one of these ids; return their number."""
        jobs = [job for job in self.jobs_of(ids) if job.names]  # the engine's own
        await self.llm.abort([name for job in jobs for name in job.names])
        return len(jobs)

    def close(self) -> None:
        """The time to drain is over: open requests end with an error."""
        self.closed = True
        for limit in self._limits:
            expire(limit)

    async def text_work(self, work: Awaitable[T]) -> T:
        """Await text work that runs on the engine's threads. Raises QueueFullError when too much of it waits."""
        if self.text_jobs.locked():
            if isinstance(work, Coroutine):
                work.close()
            raise QueueFullError("too much text waits to be tokenised")
        async with self.text_jobs:
            return await work


class Debug:
    """Rate limits of the debug endpoints."""

    def __init__(self) -> None:
        self.traces = asyncio.Semaphore(MAX_TRACES)
        self._pages: dict[int, tuple[float, asyncio.Task[EngineView]]] = {}
        """The last view of each engine, and when it was asked for"""
        self.writing = asyncio.Lock()
        """Held while a trace is written: the few threads that do it make the tokens of all requests too."""

    async def pages(self, llm: AsyncLLM, engine: int = 0) -> EngineView:
        """A view of an engine with the page map, a little old when many ask. Raises EngineDeadError."""
        now = time.monotonic()
        asked, task = self._pages.get(engine, (0.0, None))
        if task is None or (task.done() and now - asked >= PAGES_SECONDS):
            task = asyncio.create_task(llm.watches[engine].look(time.monotonic_ns()))
            self._pages[engine] = now, task
            # A failure is retrieved: the caller may have left, and asyncio would log an unawaited one as ours.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)


def expire(limit: asyncio.Timeout) -> None:
    """Let a limit that is entered pass now."""
    if not limit.expired():
        limit.reschedule(0.0)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
