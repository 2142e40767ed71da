"""The interface between the two sides of the engine, in one process or across two.

The front (text, HTTP) holds a MessageBackend; the back (loop, model, device) is a Core. ThreadBackend runs a Core on a
thread of this process; ProcessBackend runs it in a child process and speaks typed messages over a private socket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from gapless.base.bell import Bell
from gapless.base.errors import GaplessError
from gapless.base.records import PageEvent, Request, StepTokens, Turn
from gapless.engine.stats import Stats
from gapless.loop.records import StepTable
from gapless.memory.events import PageEvents


class EngineInfo(NamedTuple):
    """Facts about a running engine, fixed at its start except for its adapters."""

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
    """Parts of the start and their times: (what, seconds), in order."""
    watchdog_seconds: float = 0.0
    """Longest time of a step before the engine counts as stalled; 0: no limit."""
    adapters: tuple[str, ...] = ()
    """Names of the available adapters."""
    processors: tuple[str, ...] = ()
    """Names of the available logits processors, in their running order."""
    tiers: tuple[str, ...] = ()
    """Kinds of the tiers below the host tier, in order"""
    kv_bytes: int = 0
    """Memory of the KV pages on the device"""
    kv_cache_dtype: str = "auto"
    """The pages' format; auto: `dtype`"""
    ranks: int = 1
    """Processes that compute each step together"""
    own_memory: bool = False
    """Whether the KV cache is in memory of the device's own, not the host's"""


class AdapterChange(NamedTuple):
    """An adapter to load, or to unload if `path` is empty."""

    name: str
    path: str = ""
    """Directory of the adapter, below EngineConfig.lora_dir"""
    in_place: bool = False
    """Whether it may replace another adapter of that name"""


class OperatorOrder(StrEnum):
    """Orders of an operator to a core."""

    HOLD = "hold"
    """New requests wait; done when the loop's requests have ended"""
    FREEZE = "freeze"
    """The loop's requests freeze, and new ones wait; done when no step is in flight"""
    RESUME = "resume"
    FORGET = "forget"
    """Empty the prefix index, and the host tier with it"""


Answer = Callable[[GaplessError | None], None]
"""Takes the outcome of a change: None, or the refusal."""


class EngineView(NamedTuple):
    """A view of the engine: its latest step records, and the state of every KV page (Core.page_map)."""

    steps: StepTable
    pages: bytes


class Core(Protocol):
    """The back side: one loop, one device, one model. Not thread-safe; one thread drives it."""

    info: EngineInfo

    @property
    def bell(self) -> Bell:
        """The bell. Any thread may ring it with something to submit or ask: that ends the wait of step()."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError; RequestError if it can never fit.

        A request with a form of output is queued once its matcher is made; a step ends it if that fails.
        """

    def abort(self, key: int) -> None:
        """End a request without further tokens. Unknown keys are ignored: the request may have ended."""

    def change_adapter(self, change: AdapterChange, answer: Answer) -> None:
        """Load or unload an adapter. `answer` is called at the end, here or in a step, when `info` is up to date.

        Earlier requests keep their adapter until they end.
        """

    def update_weights(self, path: str, answer: Answer) -> None:
        """Replace the model's weights by a checkpoint's of the same architecture. `answer` is called at the end, here
        or in a step.

        Earlier requests end with the old weights; new ones wait for the new weights.
        """

    def obey(self, order: OperatorOrder, answer: Answer) -> None:
        """Carry out an operator's order. `answer` is called at the end, here or in a step."""

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, at work for has_work() that no message announces."""

    def has_work(self) -> bool:
        """Return whether step() has anything to launch, observe or capture."""

    def rest(self) -> bool:
        """Look for something to prepare while idle. Returns whether step() now has something to do."""

    def step(self) -> Turn:
        """Run one turn of the loop. Raises EngineError if the engine cannot continue."""
        ...

    def stats(self) -> Stats: ...

    def steps_after(self, step: int, since: int = 0) -> StepTable:
        """Return the kept steps later than `step`, committed at or after `since`, oldest first."""

    def page_map(self) -> bytes:
        """Return the state of every KV page, group after group, one letter each: free, cached, owned, x for fenced."""

    def page_events(self) -> PageEvents | None:
        """Start collecting changes of the prefix index; None without an index.

        A second call restarts the collection.
        """

    def close(self) -> None: ...


class Sink(NamedTuple):
    """Receivers of a backend's deliveries, called on the thread of the event loop that started it."""

    started: Callable[[int, int], None]
    """Takes the key of a request that left the queue, and its number of cached prompt tokens."""
    tokens: Callable[[*tuple[StepTokens, ...]], None]
    """Takes the settled tokens of steps, oldest first: a whole delivery at once."""
    refused: Callable[[int, Exception], None]
    """Takes the key of a refused or failed request, and the error (QueueFullError, RequestError)."""
    steps: Callable[[StepTable, int], None]
    """Takes newly completed steps, and the engine's number; only while MessageBackend.watch is on."""
    page_events: Callable[[Sequence[PageEvent], int], None]
    """Takes changes of an engine's prefix index, and its number; only after MessageBackend.send_page_events."""
    died: Callable[[Exception], None]
    """Takes the error of a dead engine that no other follows: it ends every open request."""
    broke: Callable[[Exception, Collection[int] | None, int], None]
    """Takes the error of a dead engine that another follows, the keys of its requests, which wait for one (None: all),
    and its number."""
    came_up: Callable[[], None]
    """Called when an engine takes requests, also for the first."""
