"""Builds a loop: the one place that connects the rooms below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gapless.base.errors import ConfigError
from gapless.base.params import SLOT_LANE
from gapless.base.part import Part
from gapless.device import Device
from gapless.kernels.choose import choose
from gapless.kernels.layout import PAGE_WORDS, WISH_WORDS
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.loop.learners import ChunkLearner, DraftLearner
from gapless.loop.loop import Loop
from gapless.loop.masks import Masks
from gapless.loop.parts import Parts
from gapless.loop.requests import Unserved
from gapless.loop.steplog import StepLog
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher
from gapless.memory.rows import RowTable
from gapless.memory.slots import Slots
from gapless.memory.source import NO_SOURCE, PageSource
from gapless.model.seam import Model
from gapless.offload.host import LATE_NS, HostTier
from gapless.offload.transfers import Transfers, slot_bytes
from gapless.offload.waits import LEAST_TOKENS, TierSource
from gapless.pace.chunk_limit import ChunkLimit
from gapless.pace.controllers import CONTROLLERS, Controllers
from gapless.pace.load_gate import LoadGate
from gapless.plan.limits import Limits, most_page_writes
from gapless.plan.planner import Planner
from gapless.step.adapters import AdapterLoader, Adapters
from gapless.step.executor import Executor
from gapless.step.graphs import GOING_ON, MISSES_BEFORE_CAPTURE, ON_GPU, GraphShapes, MixedSizes, buckets_up_to
from gapless.step.launcher import Follow, Launcher
from gapless.step.listing import Lanes
from gapless.step.outbox import OutboxShape
from gapless.step.packet import Packer, max_words
from gapless.step.processors import Processor
from gapless.step.program import RowOptions, StepProgram
from gapless.step.speculation import Speculation

AHEAD = 16
"""[steps] Steps' worth of pages that a row with drafts takes at once: step by step would cost the host too much"""


class Sizes(NamedTuple):
    """Bounds of everything that an engine allocates."""

    rows: int
    """Requests running at once."""
    max_len: int
    """Tokens of the longest sequence, prompt and output."""
    pages: int
    """KV pages, the null page included."""
    page_size: int
    step_tokens: int
    """Token budget of one step; at least `rows`."""
    queue: int
    """Waiting requests."""
    slots: int = 0
    """Running requests with adjusted logits."""


class HostSizes(NamedTuple):
    """Bounds of the host tier."""

    nbytes: int
    """Host memory for copies of pages"""
    least_tokens: int = LEAST_TOKENS
    """Least tokens of a load."""
    late_ns: int = LATE_NS
    """Longest wait for a load before a request computes its prompt."""
    weighs: bool = False
    """Whether a load begins only if it takes no longer than computing, by measured rates"""
    given: int = 0
    """Further host memory, for copies that peers may take; they can then map all of it"""


def build_loop(
    device: Device,
    model: Model,
    sizes: Sizes,
    depth: int | None = None,
    *,
    model_name: str = "",
    prefix_caching: bool = True,
    by_priority: bool = False,
    bounds_stalls: bool = False,
    max_itl_ns: int = 0,
    kernels: Kernels | None = None,
    buckets: Iterable[int] | None = None,
    patience: int = MISSES_BEFORE_CAPTURE,
    chain: int | None = None,
    mixed: MixedSizes | None = None,
    program: type[StepProgram] = StepProgram,
    follow: Follow | None = None,
    adapters: Adapters | None = None,
    speculation: Speculation | None = None,
    processors: tuple[Processor, ...] = (),
    host: HostSizes | None = None,
    controllers: Controllers = CONTROLLERS,
    parts: tuple[Part, ...] = (),
) -> Loop:
    """Allocate tables, KV memory and rings on `device`, and return a loop over `model`. `depth` None is auto.

    `kernels` None: the best for the device. `buckets` are the row counts of captured steps: None for the usual ones,
    empty for none. `mixed` are the captured steps with chunks, None for the usual ones if the device pads. `chain` is
    how many steps one visit may enqueue: None for auto, or 1 at a fixed depth. `bounds_stalls` limits prompt tokens
    that share a step with decoding rows if they take long; `max_itl_ns` bounds the time of such a step, 0 for no bound.
    `program` is a test's own, which gives rows several tokens in a step. `follow` takes the packets for the executors
    of other devices. `adapters` and `processors` (by place) are available to requests. `speculation` is the source of
    drafts, None for none. `host` is host memory for copies of pages, if prefixes are shared.
    """
    max_pages = -(-sizes.max_len // sizes.page_size)
    # A prompt of max_len tokens can be scored: its row gets one more, which needs no KV. Rows stay aligned.
    history = -(-(sizes.max_len + 1) // 4) * 4
    groups = model.groups()
    width = speculation.places if speculation else program.width
    ahead = AHEAD if speculation else 1
    page_writes, row_writes = _page_writes(sizes, len(groups), width * ahead)
    steps = controllers.depth(depth, chain)
    ledger = Ledger()
    pools = [PagePool(sizes.pages, sizes.page_size, ledger, group.rule) for group in groups]
    rows = RowTable(sizes.rows, sizes.max_len + 1, ledger)
    rows.slots[SLOT_LANE] = Slots(sizes.slots, ledger)
    index = PrefixIndex(PrefixHasher(model_name, sizes.page_size), pools) if prefix_caching else None
    limits_chunks = bounds_stalls or max_itl_ns or controllers.chunk_limit is not ChunkLimit
    chunk_limit = controllers.chunk_limit(max_itl_ns) if limits_chunks else None
    limits = Limits(
        sizes.step_tokens, page_writes, sizes.queue, by_priority, program.least, width, row_writes,
        history + WISH_WORDS, ahead, chunk_limit.tokens if chunk_limit else None,
    )  # fmt: skip
    places = speculation.places if speculation else 1
    tables = Tables.new(sizes.rows, history, len(groups) * max_pages, device.torch_device, model.vocab_size, places)
    cache = model.new_cache(sizes.pages, sizes.page_size, device.torch_device)
    mixed = ON_GPU if mixed is None and device.caps.pads else mixed
    # A captured step with chunks is filled up to its decode rows and its chunks, each by itself.
    most_rows = sizes.rows + (mixed.chunks[-1] if mixed else 0)
    outbox = OutboxShape(most_rows, sizes.step_tokens, width)
    kernels = kernels or choose(device.caps.kernels)
    steps_of = program(model, tables, cache, kernels, outbox, RowOptions(sizes.slots, speculation, processors))
    decode = buckets_up_to(sizes.rows) if buckets is None else tuple(sorted(set(buckets)))
    shapes = GraphShapes(
        decode if device.caps.captures else (),
        mixed if steps_of.kernels.begin_mixed is not None and not model.bounded else None,
        model.bounded,
        sizes.page_size,
        max_words(most_rows + GOING_ON[-1], page_writes, sizes.step_tokens),
        row_writes,
        len(groups),
        adapters=adapters is not None,
        places=speculation.sizes if speculation else (),
        drafted_rows=speculation.rows if speculation else 0,
        processors=len(processors),
    )
    slots, fill = steps.most + 1, limits.fill + PAGE_WORDS * page_writes
    executor = Executor(device, steps_of, shapes.words, slots, slots + steps.longest - 1, fill)
    packer, lanes = Packer(rows, max_pages, len(groups)), Lanes(rows)
    gate = speculation and controllers.draft_gate(
        sizes.rows, speculation.rows, speculation.sizes, speculation.head is None
    )
    launcher = Launcher(executor, packer, lanes, shapes, patience, gate, follow)
    shared = not device.caps.own_memory or steps_of.kernels.stores_on_host
    masked = shared and follow is None and program.width == 1
    masks = Masks(device, executor.buffers.mail, rows) if masked else None
    loader = AdapterLoader(device, adapters, rows, ledger) if adapters else None
    source: PageSource = NO_SOURCE
    transfers = None
    if host is not None and index is not None:
        assert follow is None, "pages of several devices would have to move together"
        # Half of a step's budget: decoding rows take their part of it.
        load_gate = controllers.load_gate(host.weighs, min(host.least_tokens, sizes.step_tokens // 2))
        tier = _host_tier(device, host, pools, ledger, load_gate, slot_bytes(cache))
        source = TierSource(tier, index, pools, host.least_tokens)
        transfers = Transfers(device, cache, tier, kernels.copy_pages, host.given > 0)
    planner = Planner(limits, pools, rows, ledger, index, source)
    log = StepLog(device.clock, transfers.stretches) if transfers else StepLog(device.clock)
    unserved = Unserved(adapters=loader is not None, masks=masks is not None)
    every: list[Part | None] = [unserved, loader, transfers, masks]
    every += [DraftLearner(gate, steps) if gate else None]
    every += [ChunkLearner(chunk_limit, log) if chunk_limit else None, *parts]
    made = Parts(tuple(part for part in every if part), loader, transfers, masks)
    return Loop(device, launcher, planner, rows, steps, log, made)


def _page_writes(sizes: Sizes, groups: int, tokens: int) -> tuple[int, int]:
    """Return the most pages that a step gives to all rows, and to one row that gets pages for `tokens` tokens."""
    max_pages = -(-sizes.max_len // sizes.page_size)
    most = most_page_writes(sizes.rows, max_pages, sizes.page_size, sizes.step_tokens, tokens)
    # The bound holds for any position of the first token in its page.
    return groups * most, groups * -(-(tokens + sizes.page_size - 1) // sizes.page_size)


def _host_tier(
    device: Device, host: HostSizes, pools: list[PagePool], ledger: Ledger, gate: LoadGate, page_bytes: int
) -> HostTier:
    """Return the tier that copies pages to the host and back. Raises ConfigError if none fits."""
    slots = (host.nbytes + host.given) // page_bytes
    if not slots:
        raise ConfigError(f"kv_tiers: host:{host.nbytes} holds no page of {page_bytes:,} bytes: give more")
    return HostTier(pools, ledger, slots, device.clock, host.late_ns, gate)
