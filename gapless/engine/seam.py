"""What the two sides of the engine say to each other, in one process or across two.

The front (text, HTTP) holds a Backend; the back (loop, model, device) is a Core. ThreadBackend runs a Core on a
thread of this process; ProcessBackend runs it in a child process and speaks typed messages over a private socket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from gapless.base.records import Request, StepTokens


class EngineInfo(NamedTuple):
    """Facts about a running engine, fixed from start to end."""

    model: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pages: int
    page_size: int
    depth: str
    parameters: int
    startup_seconds: tuple[tuple[str, float], ...] = ()
    """Where start-up time went: (what, seconds), in order."""


class Stats(NamedTuple):
    """Gauges and counters of the loop at one moment. Counters only grow."""

    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    """Hold a reusable prefix, owned by nobody."""
    pages_owned: int = 0
    pages_fenced: int = 0
    """Given up by their request, still reachable by a step in flight."""
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix index."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    preemptions: int = 0
    declined_depth: int = 0
    declined_ring: int = 0
    dropped_identity: int = 0
    """Outbox entries whose (row, generation) no longer matched."""


class Started(NamedTuple):
    """A request left the queue: `cached` of its prompt tokens came from the prefix index."""

    key: int
    cached: int


class Core(Protocol):
    """The back side: one loop, one device, one model. Not thread-safe; one thread drives it."""

    info: EngineInfo

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError; RequestError when it can never fit."""
        ...

    def abort(self, key: int) -> None:
        """End a request without further tokens. Unknown keys are ignored: it may have ended already."""
        ...

    def has_work(self) -> bool:
        """Whether step() has anything to launch, observe or retire."""
        ...

    def step(self) -> tuple[list[Started], list[StepTokens]]:
        """One turn of the loop. Raises EngineError when the engine cannot go on."""
        ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """Where a Backend delivers; every method runs on the thread of the asyncio loop that started the backend."""

    def started(self, item: Started) -> None: ...

    def tokens(self, item: StepTokens) -> None: ...

    def refused(self, key: int, error: Exception) -> None:
        """The back would not take this request (QueueFullError, RequestError)."""
        ...

    def died(self, error: Exception) -> None:
        """The engine is gone. Every open request ends with this error; the backend may come back by itself."""
        ...


class Backend(Protocol):
    """The front's handle on an engine."""

    info: EngineInfo

    async def start(self, sink: Sink) -> None:
        """Return when the engine can take requests; raise when it cannot be brought up."""
        ...

    def submit(self, request: Request) -> None: ...

    def abort(self, key: int) -> None: ...

    def stats(self) -> Stats:
        """The last known numbers; never blocks."""
        ...

    def ready(self) -> bool:
        """Whether the engine can take requests now."""
        ...

    async def close(self) -> None: ...


CoreFactory = Callable[[], Core]
