"""The interface between the two sides of the engine, in one process or across two.

The front (text, HTTP) holds a MessageBackend; the back (loop, model, device) is a Core. ThreadBackend runs a Core on a
thread of this process; ProcessBackend runs it in a child process and speaks typed messages over a private socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from gapless.base.bell import Bell
from gapless.base.errors import GaplessError
from gapless.base.records import CAUSES, PageEvent, Request, StepTokens, Turn
from gapless.loop.records import StepTable
from gapless.memory.events import PageEvents


class EngineInfo(NamedTuple):
    """Facts about a running engine, fixed from start to end but for its adapters."""

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
    """How long a step may take before the engine counts as stalled; 0 for ever."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that requests may ask for."""
    processors: tuple[str, ...] = ()
    """Names of the logits processors that requests may ask for, in the order in which they run."""
    tiers: tuple[str, ...] = ()
    """Kinds of the tiers below the host tier, in their order"""


class AdapterChange(NamedTuple):
    """An adapter to load, or to unload where `path` is empty."""

    name: str
    path: str = ""
    """The directory that holds it, below EngineConfig.lora_dir"""
    in_place: bool = False
    """Whether it may replace another one of that name"""


class OperatorOrder(StrEnum):
    """What an operator has a core do."""

    HOLD = "hold"
    """Requests that come wait; done when those in the loop have ended"""
    FREEZE = "freeze"
    """Requests in the loop stop where they are, and those that come wait; done when no step is in flight"""
    RESUME = "resume"
    FORGET = "forget"
    """Empty the prefix index, and the host tier with it"""


Answer = Callable[[GaplessError | None], None]
"""Takes the outcome of a change: None, or why it was not made."""


class Stats(NamedTuple):
    """Gauges and counters of the loop at one moment: gauges first, and from `steps` on counters, which only grow."""

    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    depth: int = 0
    """Steps in flight allowed now."""
    pages_total: int = 0
    """Summed over all page groups; so are the counts by state below."""
    pages_free: int = 0
    pages_cached: int = 0
    """Hold a reusable prefix, and no request owns them."""
    pages_owned: int = 0
    pages_fenced: int = 0
    """Given up by their request, still reachable by a step in flight."""
    grammars_waiting: int = 0
    """Requests that wait for the grammar of their form of output."""
    tier_slots: int = 0
    """Pages of which the host tier can hold a copy, of all page groups; so are all counts of its pages."""
    tier_used: int = 0
    tier_pinned: int = 0
    """Copies, borrowed ones too, that transfers, tiers below and peers use: they make no room."""
    tier_loading: int = 0
    """Pages on their way from the host tier to the device."""
    tier_storing: int = 0
    lower_used_bytes: tuple[int, ...] = ()
    """Bytes of pages in the tiers below the host tier, a number each, 0 where it is unknown; so are those below."""
    lower_size_bytes: tuple[int, ...] = ()
    lower_loading: tuple[int, ...] = ()
    """Pages that each is loading for a request."""
    lower_quarantined: tuple[int, ...] = ()
    """Pages of loads that no request waits for: their slots are not reused until the tier has ended the load."""
    lower_storing: tuple[int, ...] = ()
    lower_waiting: tuple[int, ...] = ()
    """Pages that wait for their store."""
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
    declined_capture: int = 0
    declined_queue: int = 0
    """Launches put off since the driver's launch queue was full of eager steps."""
    captures_refused: int = 0
    """Graphs whose capture failed; their programs run eagerly."""
    device_allocations: int = 0
    """How often, since ready, the driver was asked for device memory or given some back. Each makes the host and the
    device wait; there should be none."""
    graph_steps: int = 0
    """Steps that were replays of a captured graph."""
    graph_misses: int = 0
    """Steps that ran eagerly and could have been one."""
    chained_steps: int = 0
    """Steps that the host enqueued in one visit with the step before."""
    dropped_identity: int = 0
    """Outbox entries whose (row, generation) no longer matched."""
    held_rows: int = 0
    """Rows that a step held since their masks were late."""
    over_itl_rows: int = 0
    """Steps in which rows decode and that took longer than max_itl. These rows alone took as long here, and the least
    chunk beside them, or chunks that were expected to fit, in the next two."""
    over_itl_chunk: int = 0
    over_itl_late: int = 0
    masks: int = 0
    """Masks written for rows whose matchers decide."""
    mask_ns: int = 0
    """Time from looking at the tokens that such rows got to the mask of each."""
    drafts: int = 0
    """Rows that ran drafts, each step for itself."""
    draft_tokens: int = 0
    verified: tuple[int, ...] = ()
    """Draft tokens by their place: few rows may run many."""
    accepted: tuple[int, ...] = ()
    """Draft tokens that were right, by their place."""
    admitted_tokens: int = 0
    """Prompt tokens of requests that left the queue for the first time."""
    admitted_cached: int = 0
    """Prompt tokens among these that the prefix index gave."""
    admitted_loaded: int = 0
    """Prompt tokens among those that a tier gave: host memory, what is below it, or a peer."""
    wall_ns: int = 0
    """Time accounted for: busy_ns and all the idle times (loop/timeline.py says by which rule)."""
    busy_ns: int = 0
    idle: tuple[int, ...] = (0,) * len(CAUSES)
    """Idle time of the device by cause, ns, in the order of base.records.CAUSES."""
    plan_ns: int = 0
    """Host time of all steps, phase by phase: plan, prepare (pack), launch, wait, post (commit and retire)."""
    prepare_ns: int = 0
    launch_ns: int = 0
    wait_ns: int = 0
    post_ns: int = 0
    copy_ns: int = 0
    """Time from a step's end on the device until the host had its tokens; 0 where the device writes there itself."""
    steps_decode: int = 0
    steps_prefill: int = 0
    steps_mixed: int = 0
    step_tokens_sum: int = 0
    step_tokens: tuple[int, ...] = ()
    """Steps by their tokens: entry b counts those of more than 2**(b - 1) and at most 2**b."""
    grammars_compiled: int = 0
    grammars_ns: int = 0
    """Time that compiling them took."""
    grammar_hits: int = 0
    """Requests whose grammar had been compiled before."""
    grammars_refused: int = 0
    """Requests refused since their grammar cannot be honoured, or took too long."""
    # memory.copies.HostCounts says what the counts of the host tier are, where nothing is said here.
    tier_read_bytes: int = 0
    tier_read_ns: int = 0
    """Time that transfers to the device took, side by side or not."""
    tier_written_bytes: int = 0
    tier_written_ns: int = 0
    tier_hit: int = 0
    tier_missed: int = 0
    tier_stored: int = 0
    tier_loaded: int = 0
    tier_refused: int = 0
    tier_evicted: int = 0
    tier_late: int = 0
    tier_slower: int = 0
    tier_dropped_full: int = 0
    tier_dropped_gone: int = 0
    tier_dropped_failed: int = 0
    # memory.below.LowerCounts says what the counts of the tiers below it are.
    lower_hits: tuple[int, ...] = ()
    lower_missed: tuple[int, ...] = ()
    lower_stored: tuple[int, ...] = ()
    lower_loaded: tuple[int, ...] = ()
    lower_lent: tuple[int, ...] = ()
    lower_failed: tuple[int, ...] = ()
    lower_cancelled: tuple[int, ...] = ()
    lower_refused: tuple[int, ...] = ()
    lower_late: tuple[int, ...] = ()
    lower_dropped_busy: tuple[int, ...] = ()
    lower_dropped_slow: tuple[int, ...] = ()
    lower_dropped_gone: tuple[int, ...] = ()
    lower_dropped_failed: tuple[int, ...] = ()
    lower_read_bytes: tuple[int, ...] = ()
    lower_written_bytes: tuple[int, ...] = ()
    lower_read_ns: tuple[int, ...] = ()
    lower_written_ns: tuple[int, ...] = ()

    def plus(self, before: Stats) -> Stats:
        """Return these numbers, with counters that go on from `before`."""
        pairs = zip(self._fields, self, before, strict=True)
        sums: dict[str, Any] = {name: _sum(one, other) for name, one, other in pairs if name not in GAUGES}
        return self._replace(**sums)

    def counters(self) -> Stats:
        """Return the counters; every gauge is as at first."""
        nothing: dict[str, Any] = {name: self._field_defaults[name] for name in GAUGES}
        return self._replace(**nothing)

    @property
    def idle_ns(self) -> dict[str, int]:
        """Idle time of the device by cause."""
        return {cause.value: ns for cause, ns in zip(CAUSES, self.idle, strict=True)}

    @property
    def host_ns(self) -> dict[str, int]:
        """Time of all steps by phase."""
        return {phase: getattr(self, f"{phase}_ns") for phase in PHASES}


GAUGES = frozenset(Stats._fields[: Stats._fields.index("steps")])


def _sum(one: Any, other: Any) -> Any:
    """Add two numbers, or two tuples of numbers element by element."""
    return tuple(map(sum, zip_longest(one, other, fillvalue=0))) if isinstance(one, tuple) else one + other


PHASES = ("plan", "prepare", "launch", "wait", "post", "copy")


class EngineView(NamedTuple):
    """A view of the engine: its latest step records, and the state of every KV page (Core.page_map)."""

    steps: StepTable
    pages: bytes


class Core(Protocol):
    """The back side: one loop, one device, one model. Not thread-safe; one thread drives it."""

    info: EngineInfo

    @property
    def bell(self) -> Bell:
        """The bell. Any thread may ring it when it has something to submit or to ask: that ends the wait of step()."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError; RequestError when it can never fit.

        One with a form of output is queued once its matcher is there; a step ends it if there is none.
        """

    def abort(self, key: int) -> None:
        """End a request without further tokens. Unknown keys are ignored: it may have ended already."""

    def change_adapter(self, change: AdapterChange, answer: Answer) -> None:
        """Load or unload an adapter. `answer` is called when that is done, here or in a step; `info` knows it then.

        Requests that were taken before keep their adapter until they end.
        """

    def update_weights(self, path: str, answer: Answer) -> None:
        """Replace the model's weights by those of a checkpoint of the same architecture. `answer` is called when that
        is done, here or in a step.

        Requests that were taken before end with the old weights; those that come meanwhile wait for the new ones.
        """

    def obey(self, order: OperatorOrder, answer: Answer) -> None:
        """Do what an operator asks. `answer` is called when that is done, here or in a step."""

    def wakes(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, when something came that has_work() tells of, and no message did."""

    def has_work(self) -> bool:
        """Return whether step() has anything to launch, observe or capture."""

    def rest(self) -> bool:
        """Look, without work, for something to prepare. Returns whether step() now has something to do."""

    def step(self) -> Turn:
        """Run one turn of the loop. Raises EngineError when the engine cannot go on."""
        ...

    def stats(self) -> Stats: ...

    def steps_after(self, step: int, since: int = 0) -> StepTable:
        """The steps later than `step` that were committed at or after `since`, oldest first; those that are
        kept."""

    def page_map(self) -> bytes:
        """The state of every KV page, group after group, one letter each: free, cached, owned, x for fenced."""

    def page_events(self) -> PageEvents | None:
        """Collect, from now on, what enters and leaves the prefix index; None where there is no index.

        A second call begins again.
        """

    def close(self) -> None: ...


class Sink(NamedTuple):
    """Functions that take what a backend delivers, each on the thread of the event loop that started it."""

    started: Callable[[int, int], None]
    """Takes the key of a request that left the queue, and its prompt tokens from the prefix index."""
    tokens: Callable[[*tuple[StepTokens, ...]], None]
    """Takes what steps settled, oldest first: all of one delivery, so that it is passed on as one."""
    refused: Callable[[int, Exception], None]
    """The back would not take the request of this key, or not go on with it (QueueFullError, RequestError)."""
    steps: Callable[[StepTable], None]
    """Takes steps that have completed since the last call; only while MessageBackend.watch is on."""
    page_events: Callable[[Sequence[PageEvent]], None]
    """Takes what entered and left the prefix index; only after MessageBackend.send_page_events."""
    died: Callable[[Exception], None]
    """The engine is gone. Every open request ends with this error; the backend may come back by itself."""
