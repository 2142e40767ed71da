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


class Stats(NamedTuple):
    """Gauges and counters of the loop at one moment: gauges first, then, from `steps` on, counters, which only grow."""

    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    depth: int = 0
    """Allowed number of steps in flight."""
    pages_total: int = 0
    """Summed over all page groups; so are the counts by state below."""
    pages_free: int = 0
    pages_cached: int = 0
    """Pages with a reusable prefix that no request owns."""
    pages_owned: int = 0
    pages_fenced: int = 0
    """Released by their request, still reachable by a step in flight."""
    grammars_waiting: int = 0
    """Requests that wait for the grammar of their form of output."""
    tier_slots: int = 0
    """Page copies that the host tier has room for, over all page groups, as are all its page counts."""
    tier_used: int = 0
    tier_pinned: int = 0
    """Copies in use by transfers, tiers below and peers, borrowed ones included: they cannot be evicted."""
    tier_loading: int = 0
    """Pages being loaded from the host tier to the device."""
    tier_storing: int = 0
    lower_used_bytes: tuple[int, ...] = ()
    """Bytes of pages in the tiers below the host tier, a number each, 0 if unknown; the following fields alike."""
    lower_size_bytes: tuple[int, ...] = ()
    lower_loading: tuple[int, ...] = ()
    """Pages that each tier is loading for a request."""
    lower_quarantined: tuple[int, ...] = ()
    """Pages of abandoned loads: their slots are not reused until the tier has ended the load."""
    lower_storing: tuple[int, ...] = ()
    lower_waiting: tuple[int, ...] = ()
    """Pages waiting for their store."""
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
    """Launches declined because eager steps filled the driver's launch queue."""
    captures_refused: int = 0
    """Graphs whose capture failed; their programs run eagerly."""
    device_allocations: int = 0
    """Device allocations and frees in the driver since ready. Each makes host and device wait; there should be none."""
    graph_steps: int = 0
    """Steps that replayed a captured graph."""
    graph_misses: int = 0
    """Steps that ran eagerly and could have replayed a graph."""
    chained_steps: int = 0
    """Steps enqueued in one visit of the host with the step before."""
    dropped_identity: int = 0
    """Outbox entries whose (row, generation) no longer matched."""
    held_rows: int = 0
    """Rows held in a step because their masks were late."""
    over_itl_rows: int = 0
    """Steps with decoding rows that took longer than max_itl: by these rows alone here, by the least chunk or by chunks
    with too low a forecast in the next two."""
    over_itl_chunk: int = 0
    over_itl_late: int = 0
    masks: int = 0
    """Masks written for rows with matchers."""
    mask_ns: int = 0
    """Time from reading such rows' tokens to the mask of each."""
    drafts: int = 0
    """Rows that ran drafts, summed over steps."""
    draft_tokens: int = 0
    verified: tuple[int, ...] = ()
    """Draft tokens by place: few rows may run many."""
    accepted: tuple[int, ...] = ()
    """Right draft tokens, by place."""
    admitted_tokens: int = 0
    """Prompt tokens of requests that left the queue for the first time."""
    admitted_cached: int = 0
    """Prompt tokens among these found in the prefix index."""
    admitted_loaded: int = 0
    """Prompt tokens among the found ones loaded from a tier: host memory, one below it, or a peer."""
    wall_ns: int = 0
    """Time accounted for: busy_ns and all idle times, by the rules in loop/timeline.py."""
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
    """Steps by number of tokens: entry b counts steps of more than 2**(b - 1) and at most 2**b."""
    grammars_compiled: int = 0
    grammars_ns: int = 0
    """Time of compiling them."""
    grammar_hits: int = 0
    """Requests with an already compiled grammar."""
    grammars_refused: int = 0
    """Requests refused because their grammar is unsupported, or took too long."""
    # offload.copies.HostCounts documents the other counts of the host tier.
    tier_read_bytes: int = 0
    tier_read_ns: int = 0
    """Total time of transfers to the device, concurrent or not."""
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
    # offload.below.LowerCounts documents the counts of the tiers below.
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
        """Return these numbers, with `before` added to the counters."""
        pairs = zip(self._fields, self, before, strict=True)
        sums: dict[str, Any] = {name: _sum(one, other) for name, one, other in pairs if name not in GAUGES}
        return self._replace(**sums)

    def counters(self) -> Stats:
        """Return the counters, with gauges at their defaults."""
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
    steps: Callable[[StepTable], None]
    """Takes newly completed steps; only while MessageBackend.watch is on."""
    page_events: Callable[[Sequence[PageEvent]], None]
    """Takes changes of the prefix index; only after MessageBackend.send_page_events."""
    died: Callable[[Exception], None]
    """Takes the error of a dead engine, which ends every open request; the backend may restart by itself."""
