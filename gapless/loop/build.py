"""Builds a loop: the one place that connects the rooms below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gapless.base.errors import ConfigError
from gapless.base.params import SLOT_LANE
from gapless.base.part import Part
from gapless.device import Caps, Device
from gapless.kernels.choose import choose
from gapless.kernels.layout import PAGE_WORDS, WISH_WORDS
from gapless.kernels.seam import Kernels
from gapless.loop import mask_threads
from gapless.loop.learners import ChunkLearner, DraftLearner
from gapless.loop.loop import Loop
from gapless.loop.masks import Masks
from gapless.loop.parts import LoopParts
from gapless.loop.requests import Unserved
from gapless.loop.spec import HostSizes, LoopSpec
from gapless.loop.steplog import Beside, RankWaits, StepLog
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher
from gapless.memory.rows import RowTable
from gapless.memory.slots import Slots
from gapless.memory.source import NO_SOURCE
from gapless.model.seam import KVCache, Model
from gapless.offload.host import HostTier
from gapless.offload.ranks import OtherRanks
from gapless.offload.transfers import SlotLayout, Transfers
from gapless.offload.waits import TierSource
from gapless.pace.chunk_limit import ChunkLimit
from gapless.pace.depth import Depth
from gapless.plan.limits import Limits, most_page_writes
from gapless.plan.planner import Planner
from gapless.step.adapters import AdapterLoader
from gapless.step.executor import Executor
from gapless.step.graphs import GOING_ON, ON_GPU, GraphShapes, MixedSizes, buckets_up_to
from gapless.step.launcher import Launcher
from gapless.step.listing import Lanes
from gapless.step.memory import MemorySizes, build_executor
from gapless.step.outbox import OutboxShape
from gapless.step.packet import Packer, max_words
from gapless.step.program import RowOptions, StepProgram

AHEAD = 16
"""[steps] Steps' worth of pages that a row with drafts takes at once: step by step would cost the host too much"""


class Extents(NamedTuple):
    """Sizes that follow from a spec, a model and a device."""

    groups: int
    max_pages: int
    """Pages of the longest sequence, in one group."""
    history: int
    """Tokens of a row's history."""
    width: int
    """Most tokens that a step adds to a row."""
    page_writes: int
    """Most pages that a step gives to all rows."""
    row_writes: int
    """Most pages that a captured step gives to one row."""
    mixed: MixedSizes | None
    most_rows: int
    """Rows of the widest captured step: it is filled up to its decode rows and its chunks, each by itself."""

    @property
    def fill(self) -> int:
        """Most words that fill a new row, without its pages."""
        return self.history + WISH_WORDS

    @classmethod
    def of(cls, spec: LoopSpec, model: Model, caps: Caps) -> Extents:
        sizes, drafts = spec.sizes, spec.speculation
        groups, max_pages = len(model.groups()), -(-sizes.max_len // sizes.page_size)
        # A prompt of max_len tokens can be scored: its row gets one more, which needs no KV. Rows stay aligned.
        history = -(-(sizes.max_len + 1) // 4) * 4
        width = drafts.places if drafts else spec.program.width
        tokens = width * (AHEAD if drafts else 1)
        page_writes = groups * most_page_writes(sizes.rows, max_pages, sizes.page_size, sizes.step_tokens, tokens)
        # The bound holds for any position of the first token in its page.
        row_writes = groups * -(-(tokens + sizes.page_size - 1) // sizes.page_size)
        mixed = ON_GPU if spec.mixed is None and caps.pads else spec.mixed
        most_rows = sizes.rows + (mixed.chunks[-1] if mixed else 0)
        return cls(groups, max_pages, history, width, page_writes, row_writes, mixed, most_rows)


def build_loop(device: Device, model: Model, spec: LoopSpec) -> Loop:
    """Allocate tables, KV memory and rings on `device`, and return a loop over `model`."""
    extents, sizes = Extents.of(spec, model, device.caps), spec.sizes
    depth, ledger = spec.controllers.depth(spec.depth, spec.chain), Ledger()
    pools = [PagePool(sizes.pages, sizes.page_size, ledger, group.rule) for group in model.groups()]
    index = PrefixIndex(PrefixHasher(spec.model_name, sizes.page_size), pools) if spec.prefix_caching else None
    rows = RowTable(sizes.rows, sizes.max_len + 1, ledger)
    rows.slots[SLOT_LANE] = Slots(sizes.slots, ledger)
    limits_chunks = spec.bounds_stalls or spec.max_itl_ns or spec.controllers.chunk_limit is not ChunkLimit
    chunk_limit = spec.controllers.chunk_limit(spec.max_itl_ns) if limits_chunks else None
    limits = _limits(spec, extents, chunk_limit)
    launcher = _launcher(device, model, rows, depth, spec, extents)
    tier = _host_tier(device, spec, pools, ledger, launcher.program) if spec.host and index else None
    source = TierSource(tier, index, pools, spec.host.least_tokens) if tier and spec.host and index else NO_SOURCE
    planner = Planner(limits, pools, rows, ledger, index, source)
    adapters = AdapterLoader(device, spec.adapters, rows, ledger, spec.ranks) if spec.adapters else None
    transfers = _transfers(device, launcher.program, tier, spec) if tier else None
    masks = _masks(launcher, rows, spec)
    beside = Beside(waits=RankWaits(spec.ranks.waited) if spec.ranks is not None else None)
    log = StepLog(device.clock, beside._replace(copies=transfers.stretches) if transfers else beside)
    every: list[Part | None] = [Unserved(adapters is not None, masks is not None), adapters, transfers, masks]
    every.append(DraftLearner(launcher.gate, depth) if launcher.gate else None)
    every.append(ChunkLearner(chunk_limit, log) if chunk_limit else None)
    parts = LoopParts((*(part for part in every if part), *spec.parts), adapters, transfers, masks)
    return Loop(device, launcher, planner, rows, depth, log, parts)


def _limits(spec: LoopSpec, extents: Extents, chunk_limit: ChunkLimit | None) -> Limits:
    sizes = spec.sizes
    return Limits(
        sizes.step_tokens, extents.page_writes, sizes.queue, spec.by_priority, spec.program.least, extents.width,
        extents.row_writes, extents.fill, AHEAD if spec.speculation else 1,
        chunk_limit.tokens if chunk_limit else None,
    )  # fmt: skip


def step_sizes(device: Device, model: Model, spec: LoopSpec) -> MemorySizes:
    """Return the sizes of the steps of such a loop, for the ranks that follow it."""
    extents, depth = Extents.of(spec, model, device.caps), spec.controllers.depth(spec.depth, spec.chain)
    return _step_sizes(_shapes(device, model, spec, extents), depth, spec, extents)


def executor_without_pages(device: Device, model: Model, spec: LoopSpec) -> Executor:
    """Return an executor for the steps of such a loop that has the null page alone."""
    sizes = step_sizes(device, model, spec)._replace(pages=1, packets=1, outboxes=1)
    return build_executor(device, model, spec.program, _kernels(device, spec), sizes, _options(spec))


def _options(spec: LoopSpec) -> RowOptions:
    return RowOptions(spec.sizes.slots, spec.speculation, spec.processors, spec.group)


def _step_sizes(shapes: GraphShapes, depth: Depth, spec: LoopSpec, extents: Extents) -> MemorySizes:
    sizes, packets = spec.sizes, depth.most + 1
    outbox = OutboxShape(extents.most_rows, sizes.step_tokens, extents.width)
    fill = extents.fill + PAGE_WORDS * extents.page_writes
    return MemorySizes(
        sizes.rows, extents.history, extents.groups * extents.max_pages, sizes.pages, sizes.page_size, outbox,
        shapes.words, packets, packets + depth.longest - 1, fill,
    )  # fmt: skip


def _launcher(device: Device, model: Model, rows: RowTable, depth: Depth, spec: LoopSpec, extents: Extents) -> Launcher:
    shapes, drafts = _shapes(device, model, spec, extents), spec.speculation
    sizes = _step_sizes(shapes, depth, spec, extents)
    executor = build_executor(device, model, spec.program, _kernels(device, spec), sizes, _options(spec))
    packer, lanes = Packer(rows, extents.max_pages, extents.groups), Lanes(rows)
    make = spec.controllers.draft_gate
    gate = make(spec.sizes.rows, drafts.rows, drafts.sizes, drafts.head is None) if drafts else None
    return Launcher(executor, packer, lanes, shapes, spec.patience, gate, spec.ranks)


def _kernels(device: Device, spec: LoopSpec) -> Kernels:
    return spec.kernels or choose(device.caps.kernels)


def _shapes(device: Device, model: Model, spec: LoopSpec, extents: Extents) -> GraphShapes:
    sizes, drafts = spec.sizes, spec.speculation
    decode = buckets_up_to(sizes.rows) if spec.buckets is None else tuple(sorted(set(spec.buckets)))
    mixes = _kernels(device, spec).begin_mixed is not None and not model.bounded
    return GraphShapes(
        decode if device.caps.captures else (),
        extents.mixed if mixes else None,
        model.bounded,
        sizes.page_size,
        max_words(extents.most_rows + GOING_ON[-1], extents.page_writes, sizes.step_tokens),
        extents.row_writes,
        extents.groups,
        adapters=spec.adapters is not None,
        places=drafts.sizes if drafts else (),
        drafted_rows=drafts.rows if drafts else 0,
        processors=len(spec.processors),
    )


def _masks(launcher: Launcher, rows: RowTable, spec: LoopSpec) -> Masks | None:
    """Return the masks; None if a row takes several tokens of its own in a step."""
    device, mail = launcher.executor.device, launcher.executor.buffers.mail
    if spec.program.width > 1:
        return None
    threads = None if spec.mask_polls is None else mask_threads.start(mail, spec.mask_polls)
    return Masks(device, mail, rows, threads)


def _host_tier(
    device: Device, spec: LoopSpec, pools: Sequence[PagePool], ledger: Ledger, program: StepProgram
) -> HostTier:
    """Return the tier that copies pages to the host and back. Raises ConfigError if none fits."""
    assert spec.host is not None
    host, slots = spec.host, host_slots(spec.host, program.cache, spec.group.share.world)
    # Half of a step's budget: decoding rows take their part of it.
    gate = spec.controllers.load_gate(host.weighs, min(host.least_tokens, spec.sizes.step_tokens // 2))
    return HostTier(pools, ledger, slots, device.clock, host.late_ns, gate)


def host_slots(host: HostSizes, cache: KVCache, ranks: int) -> int:
    """Return the slots of a host tier, in each page group. Raises ConfigError if it has none."""
    slot_bytes = sum(SlotLayout(cache, 1, ranks).strides)
    slots = (host.nbytes + host.given) // slot_bytes
    if not slots:
        raise ConfigError(f"kv_tiers: host:{host.nbytes} holds no page of {slot_bytes:,} bytes: give more")
    return slots


def _transfers(device: Device, program: StepProgram, tier: HostTier, spec: LoopSpec) -> Transfers:
    shares = spec.host is not None and spec.host.given > 0
    others = OtherRanks(spec.ranks) if spec.ranks is not None else None
    return Transfers(device, program.cache, tier, program.kernels.copy_pages, shares, others, spec.group.share)
