"""Moves pages between the device and their copies in host memory, while steps run.

Each direction has its own stream. A transfer is one operation for any number of pages, so that starting it costs the
loop little time. No step waits for one: a store reads pages of steps that the host has observed, tokens included, and a
load writes pages that no step in flight can reach, so the host's own order suffices.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.base.errors import DeviceError
from gapless.base.part import Part
from gapless.base.records import Int64s, MoveOrder
from gapless.base.share import WHOLE_SHARE, Share
from gapless.base.shared import Bytes, PeerMemory, SharedMemory
from gapless.device import Device, Fence, Stream
from gapless.device.ring import PAGE_BYTES, RingSlot, host_bytes
from gapless.kernels import pages as reference
from gapless.memory.pages import NULL_PAGE
from gapless.model.seam import KVCache
from gapless.offload.copies import HostCounts, Lease, PageCopy
from gapless.offload.host import BATCH_PAGES, HostTier, MoveBatch, PageMove
from gapless.offload.ranks import FAILED_MOVE, OtherRanks, joined
from gapless.pace.load_gate import HOST_SOURCE

log = logging.getLogger("gapless.offload.tiers")

MOST_BATCH = 256
"""[pages] Most pages of one transfer"""
MOST_AT_REST = 2
"""[transfers] Most running transfers of one direction while no row runs; one store if no peer takes pages, since pages
that wait for their store cannot be given away."""
AT_REST = 64
"""[pages] Pages of one load, or of all running stores, while no row runs: small transfers end and serve early"""
HOST_SHARE = 0.1
"""[share] Largest share of the loop's time between two looks for transfers of both directions"""
RANKS_SECONDS = 0.1
"""[s] Longest wait for an answer of the other ranks between two looks: each rings"""
ONE_STRETCH_NS = 1_000_000
"""Two transfers closer than this are shown as one."""

PageMemory = list[Tensor]
"""One tensor a page group, [pages or slots, words]: pages as words of 4 bytes, or the largest that fit."""

CopyPages = Callable[[Tensor, Tensor, Tensor, Tensor], None]
GroupParts = list[tuple[Tensor, Tensor, Tensor]]
"""Source, destination and places, for each page group of a transfer"""


class SlotLayout:
    """The places of the host tier's slots in its memory. A slot has the parts of all ranks, one after another."""

    def __init__(self, cache: KVCache, slots: int, ranks: int) -> None:
        self._groups = (cache.data, *cache.others)
        self._slots = slots
        self.strides = [_rounded(ranks * memory[0].nbytes) for memory in self._groups]
        """Bytes of one slot, by page group: whole pages of the operating system"""
        self._starts, self.nbytes = _starts(slots, self.strides)

    def pages(self) -> PageMemory:
        """Return this rank's pages on its device."""
        return [_words(memory.flatten(1)) for memory in self._groups]

    def slots(self, arena: Tensor) -> list[Tensor]:
        """Return all slots of each group, uint8 [slots, bytes]."""
        return [
            arena[start : start + self._slots * stride].view(self._slots, stride)
            for start, stride in zip(self._starts, self.strides, strict=True)
        ]

    def parts(self, arena: Tensor, rank: int) -> PageMemory:
        """Return a rank's part of all slots."""
        sizes = [memory[0].nbytes for memory in self._groups]
        return [
            _words(raw[:, rank * nbytes : (rank + 1) * nbytes], nbytes)
            for raw, nbytes in zip(self.slots(arena), sizes, strict=True)
        ]


class Transfers(Part):
    """The host tier's memory, and the running transfers. `poll` never waits."""

    def __init__(
        self, device: Device, cache: KVCache, host: HostTier, copy_pages: CopyPages, shares: bool = False,
        others: OtherRanks | None = None, share: Share = WHOLE_SHARE,
    ) -> None:  # fmt: skip
        """`copy_pages` is the kernels'. `shares`: peers may map the host's memory. `others` move their parts, too."""
        self.host = host
        self.adopt: Callable[[Bytes], Callable[[], None] | None] = device.adopt if others is None else lambda data: None
        """Registers a peer's memory for transfers; not with other ranks, which have not mapped it"""
        self._device, self._others = device, others
        layout = SlotLayout(cache, host.groups[0].size, share.world)
        memory = None
        if others is not None:
            memory = others.host_memory(layout.nbytes)
        elif shares:
            memory = SharedMemory(layout.nbytes)
        self.shared = memory if shares else None
        arena = device.host_memory(layout.nbytes, None if memory is None else torch.from_numpy(memory.data))
        self.slots = layout.parts(arena, share.rank)
        """The host's memory for this rank's parts of pages"""
        self.memory = [host_bytes(raw) for raw in layout.slots(arena)]
        """The host's memory as bytes, a buffer a group: consecutive slots of whole pages of the operating system"""
        pages = layout.pages()
        self.bulk_out = TransferWay(device, device.bulk_out, True, copy_pages, pages, self.slots)
        self.bulk_in = TransferWay(device, device.bulk_in, False, copy_pages, pages, self.slots)
        for way in (self.bulk_out, self.bulk_in):
            way.others, way.ranks = others, share.world
        self._polled_at = device.clock()
        self.page_ns = 0.0
        """Time of the loop's thread for each page, in the latest look that started transfers"""
        observe.built(self)

    brings_pages = True

    @property
    def busy(self) -> bool:  # type: ignore[override]
        """Return whether a transfer is running or due, or a tier has news."""
        news = bool(self.host.below.tiers) and self.host.below.has_news
        return bool(self.bulk_in.underway or self.bulk_out.underway) or self.host.busy or news

    def before_plan(self) -> None:
        if not self.host.running:
            self.take()  # arrived pages may be all that can run

    def rung(self) -> None:
        self.take()  # arrived pages may be planned beside the steps in flight

    def poll(self) -> bool:
        """Take in ended transfers, and begin the next of each direction. Returns the result of `take`."""
        before, self._polled_at = self._polled_at, self._device.clock()
        came, begun, passed = self.take(), 0, self._polled_at - before
        loads = 1 if self.host.running else MOST_AT_REST
        stores = loads if self.host.below.gives else 1
        ways = (
            (self.bulk_in, self.host.next_load, loads, AT_REST),
            (self.bulk_out, self.host.next_store, stores, AT_REST // stores),
        )
        for way, following, count, rest in ways:
            since = self._device.clock()
            while len(way.underway) < count and way.ready:
                if (batch := following(self.most(passed, begun, rest))) is None:
                    break
                begun += way.begin(batch, since)
                if way is self.bulk_in or self.host.below.gives:
                    way.stream.ring(self._device.bell)  # a request, or a peer, waits for it
                since = self._device.clock()
        if begun:
            self.page_ns = (self._device.clock() - self._polled_at) / begun
        return came

    def most(self, passed: int, begun: int = 0, rest: int = AT_REST) -> int:
        """Return the most pages of a transfer, `passed` ns after the last look, which has already `begun` others;
        `rest` while no row runs. With running rows a look follows each step or load: long steps allow more pages, and
        short ones still a few, so that neither direction stops."""
        if not self.page_ns:
            return BATCH_PAGES
        pages = int(HOST_SHARE * passed / self.page_ns) - begun if self.host.running else rest
        return max(BATCH_PAGES, min(MOST_BATCH, pages))

    def take(self) -> bool:
        """Take in ended transfers, and news from tiers below. Returns whether there was any, so that waiting requests
        may be planned."""
        loaded, stored = self.bulk_in.ended(), self.bulk_out.ended()
        if loaded is not None:
            seen_at = self._device.clock()
            self.host.loaded(*loaded)
            took = self.bulk_in.took_ns + self._device.clock() - seen_at  # the loop's own time is part of it
            self.host.gate.moved(HOST_SOURCE, len(loaded[0].moves), took)
        if stored is not None:
            self.host.stored(*stored)
        came = bool(self.host.below.tiers) and self.host.below.poll()
        return came or loaded is not None or stored is not None

    def retired(self, flight: Any, measured: Any) -> None:
        if self._others is not None:
            self._others.steps += 1
        if not measured.scores:
            self.host.gate.computed(flight.plan.chunk_tokens, measured.device)

    def stretches(self) -> tuple[int, int, int, int]:
        """Return the stretch (from, until) of moves to the device, and then from it, since the last call; zeros for
        none."""
        return *self.bulk_in.stretch(), *self.bulk_out.stretch()

    def report(self) -> HostCounts:
        """Return the host tier's counts, with moved and moving amounts."""
        read, written = self.bulk_in, self.bulk_out
        return replace(
            self.host.report(), loading=read.moving, storing=written.moving,
            read_bytes=read.bytes, read_ns=read.ns, written_bytes=written.bytes, written_ns=written.ns,
        )  # fmt: skip

    def slot(self, group: int, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        memory, stride = self.memory[group], self.stride(group)
        return memory[slot * stride : (slot + 1) * stride]

    def stride(self, group: int) -> int:
        """Return the bytes of one slot of a group."""
        return len(self.memory[group]) // self.host.groups[group].size

    def warm_up(self) -> None:
        """Move null pages there and back, and wait, to load kernels and buffers. The gate starts with their times;
        counts of warm-up requests are reset."""
        moves = [
            PageMove(number, NULL_PAGE, PageCopy(group, b"", slot % group.size))
            for slot in range(BATCH_PAGES) for number, group in enumerate(self.host.groups)
        ]  # fmt: skip
        vars(self.host.counts).update(vars(HostCounts()))
        self.host.gate = self.host.gate.fresh()
        null = MoveBatch(0, moves[:MOST_BATCH])  # of all groups
        for way in (self.bulk_out, self.bulk_in, self.bulk_in):
            way.begin(null, self._device.clock())
            self._device.drain()
            while (ended := way.ended()) is None and way.others is not None:
                self._device.bell.wait(RANKS_SECONDS)
                self._device.bell.clear()
            if ended is None or None in ended[1]:
                raise DeviceError("no page can be moved between the device and the host: see the log line before")
            if way is self.bulk_in:
                self.host.gate.moved(HOST_SOURCE, len(null.moves), way.took_ns)
            way.bytes = way.ns = 0
            way.stretch()

    def awaited(self) -> bool:
        return self.host.below.patience() is not None

    def wait(self, bell: Bell, seconds: float) -> bool:
        """Begin the next transfers; wait for a running one, a load first, or for a tier that a request waits for."""
        if self.poll():
            return True
        for way in (self.bulk_in, self.bulk_out):
            if way.underway:
                if not way.underway[0].fence.done():
                    way.underway[0].fence.wait(bell)
                elif way.others is not None:
                    bell.wait(RANKS_SECONDS)
                return True
        patience = self.host.below.patience()
        if patience is None or not seconds:
            return False
        bell.wait(min(seconds, patience))
        return True


class RunningTransfer(NamedTuple):
    """A running transfer."""

    batch: MoveBatch
    fence: Fence
    errors: list[Exception]
    """Errors raised by its program"""
    slot: int
    """Index of its memory for places and checksums"""
    since: int
    """Start of its preparation, ns of the device's clock; `began` is its start on the device"""
    began: int


class TransferWay:
    """One direction: from the device if it `stores`, else to the device."""

    def __init__(
        self, device: Device, stream: Stream, stores: bool, copy_pages: CopyPages, pages: PageMemory, slots: PageMemory
    ) -> None:
        self._device, self.stream, self._stores, self.copy_pages = device, stream, stores, copy_pages
        self._src, self._dst = (pages, slots) if stores else (slots, pages)
        self._page_bytes = [memory[0].nbytes for memory in pages]
        self._peers: WeakKeyDictionary[PeerMemory, PageMemory] = WeakKeyDictionary()
        """Memory of peers that lend pages"""
        self.sums = torch.zeros(MOST_BATCH, dtype=torch.int64, device=device.torch_device)
        """Checksums of the running transfer, one a direction"""
        self.arrived = device.ring(MOST_AT_REST, 8 * MOST_BATCH).slots
        """Checksums on the host"""
        self.places = device.ring(MOST_AT_REST, 8 * MOST_BATCH).slots
        """Pages and slots of the running transfers, int32 [2, count] group by group"""
        self.underway: deque[RunningTransfer] = deque()
        self.others: OtherRanks | None = None
        self.ranks = 1
        self._begun = 0
        self.bytes = self.ns = self.took_ns = 0
        """Bytes and time of all transfers, and time of the latest with its preparation"""
        self._ended = self._from = self._until = 0

    @property
    def moving(self) -> int:
        """Pages of running transfers"""
        return sum([len(one.batch.moves) for one in [*self.underway]])  # also from threads that look

    @property
    def ready(self) -> bool:
        """Return whether the other ranks can take the order of another transfer, too."""
        return self.others is None or self.others.ready

    def stretch(self) -> tuple[int, int]:
        """Return start and end of the latest transfers ended since the last call."""
        found, self._from, self._until = (self._from, self._until), 0, 0
        return found

    def begin(self, batch: MoveBatch, since: int) -> int:
        """Begin a transfer prepared since time `since`; return its pages."""
        began, count, slot = self._device.clock(), len(batch.moves), self._begun % MOST_AT_REST
        batch = batch._replace(moves=sorted(batch.moves, key=_source))
        places = self.places[slot]
        parts = self._parts(batch.moves, places)
        if self.others is not None:
            counts = [(group, len([*some])) for group, some in groupby(batch.moves, lambda move: move.group)]
            self.others.tell(self._stores, self._begun, counts, places.array[: 8 * count].tobytes())
        self.underway.append(RunningTransfer(batch, *self._launch(parts, count, slot), slot, since, began))
        self._begun += 1
        return count

    def obey(self, order: MoveOrder) -> tuple[Fence, list[Exception]]:
        """Begin the leader's transfer, as a rank that follows; return its end, and errors raised until then."""
        slot, first, parts = self.places[order.number % MOST_AT_REST], 0, GroupParts()
        slot.array[: len(order.places)] = np.frombuffer(order.places, np.uint8)
        for group, count in order.counts:
            places = slot.tensor.view(torch.int32)[2 * first : 2 * (first + count)].view(2, -1)
            parts.append((self._src[group], self._dst[group], places))
            first += count
        return self._launch(parts, first, order.number % MOST_AT_REST)

    def sums_of(self, number: int, count: int) -> Int64s:
        """Return the checksums of an ended transfer."""
        sums: Int64s = self.arrived[number % MOST_AT_REST].array.view(np.int64)
        return sums[:count]

    def _launch(self, parts: GroupParts, count: int, slot: int) -> tuple[Fence, list[Exception]]:
        sums, errors = self.sums[:count], list[Exception]()
        arrived = self.arrived[slot].tensor.view(torch.int64)[:count]
        reads, writes = (self.places[slot],), (sums, arrived)
        self.stream.launch(self._run, parts, sums, arrived, errors, reads=reads, writes=writes)
        return self.stream.record(timed=True), errors

    def _parts(self, moves: Sequence[PageMove], slot: RingSlot) -> GroupParts:
        """Write the sources and destinations of each group's pages."""
        places, tensor, parts, first = slot.array.view(np.int32), slot.tensor.view(torch.int32), GroupParts(), 0
        for (group, _), some in groupby(moves, _source):
            alike = [*some]
            ends = [(move.page, move.copy.slot) for move in alike]
            here = slice(2 * first, 2 * (first + len(ends)))
            places[here] = np.array(ends, np.int32).T[:: 1 if self._stores else -1].reshape(-1)
            parts.append((self.sources(alike[0].copy.lease)[group], self._dst[group], tensor[here].view(2, -1)))
            first += len(ends)
        return parts

    def sources(self, lease: Lease | None) -> PageMemory:
        """Return the source memory of pages, by group: the peer's memory for lent ones."""
        if lease is None:
            return self._src
        assert lease.memory is not None, "a page is loaded before it is lent"
        if lease.memory not in self._peers:
            data = torch.from_numpy(writable(lease.memory.data))
            self._peers[lease.memory] = [
                _words(data[: len(data) // stride * stride].view(-1, stride)[:, :nbytes], nbytes)
                for nbytes in self._page_bytes for stride in [_rounded(nbytes)]
            ]  # fmt: skip
        return self._peers[lease.memory]

    def _run(self, parts: GroupParts, sums: Tensor, arrived: Tensor, errors: list[Exception]) -> None:
        """Copy all pages. An error fails this transfer, and not the device."""
        copy_pages = self.copy_pages if observe.watcher is None else reference.copy_pages  # a checker sees page by page
        try:
            sums.zero_()
            first = 0
            for src, dst, places in parts:
                end = first + places.shape[1]
                copy_pages(src, dst, places, sums[first:end])
                first = end
            self._device.download(arrived, sums)
        except Exception as error:
            errors.append(error)

    def ended(self) -> tuple[MoveBatch, Sequence[int | None]] | None:
        """Return the oldest transfer, if it has ended, and the checksums of its pages: None if it failed."""
        if not self.underway or not self.underway[0].fence.done():
            return None
        one, count, number = self.underway[0], len(self.underway[0].batch.moves), self._begun - len(self.underway)
        sums: Int64s | None = self.sums_of(one.slot, count)
        if self.others is not None:
            said = self.others.moved(self._stores, number)
            if said is None:
                return None
            sums = joined(self.sums_of(one.slot, count), said)
        self.underway.popleft()
        self._count(one, one.fence.time())
        return one.batch, [None] * count if failed(one.errors, count) or sums is None else sums.tolist()

    def _count(self, one: RunningTransfer, until: int) -> None:
        self.bytes += self.ranks * sum([self._page_bytes[move.group] for move in one.batch.moves])
        self.took_ns = until - max(one.since, self._ended)  # without the wait for the previous one
        self.ns += until - max(one.began, self._ended)
        if not self._until or one.began - self._until > ONE_STRETCH_NS:
            self._from = one.began
        self._until = self._ended = until


class FollowingMoves:
    """The transfers of a rank that follows: it moves its part of pages when the leader orders it."""

    def __init__(
        self, device: Device, cache: KVCache, copy_pages: CopyPages, slots: int, memory: SharedMemory, share: Share
    ) -> None:  # fmt: skip
        """`memory` is the leader's, as this rank has mapped it."""
        layout = SlotLayout(cache, slots, share.world)
        assert layout.nbytes == len(memory.data), f"the leader's slots have {len(memory.data)} bytes"
        parts = layout.parts(device.host_memory(layout.nbytes, torch.from_numpy(memory.data)), share.rank)
        pages = layout.pages()
        self._out = TransferWay(device, device.bulk_out, True, copy_pages, pages, parts)
        self._in = TransferWay(device, device.bulk_in, False, copy_pages, pages, parts)
        self.underway: deque[tuple[MoveOrder, Fence, list[Exception]]] = deque()

    def begin(self, order: MoveOrder, fence: Fence | None) -> None:
        """Begin a transfer after `fence`, the end of the steps that it comes after, unless they have ended."""
        way = self._out if order.stores else self._in
        if fence is not None:
            way.stream.after(fence)
        self.underway.append((order, *way.obey(order)))

    def ended(self) -> list[tuple[MoveOrder, bytes]]:
        """Return transfers that have ended since the last call, with the checksums of their parts, or FAILED_MOVE."""
        ended = [one for one in self.underway if one[1].done()]
        for one in ended:
            self.underway.remove(one)
        return [(order, self._sums(order, errors)) for order, _, errors in ended]

    def _sums(self, order: MoveOrder, errors: list[Exception]) -> bytes:
        way, count = self._out if order.stores else self._in, sum([count for _, count in order.counts])
        return FAILED_MOVE if failed(errors, count) else way.sums_of(order.number, count).tobytes()


def failed(errors: Sequence[Exception], count: int) -> bool:
    """Return whether a transfer has failed, and log why."""
    for error in errors:
        log.warning("a transfer of %d pages failed: %s: %s", count, type(error).__name__, error)
    return bool(errors)


def _source(move: PageMove) -> tuple[int, int]:
    """Return equal values for pages of one group in one memory."""
    return move.group, 0 if move.copy.lease is None else id(move.copy.lease.memory)


def writable(data: Bytes) -> Bytes:
    """Return the same memory as writable, since torch warns of read-only memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * len(data)).from_address(data.ctypes.data))


def _starts(slots: int, strides: Sequence[int]) -> tuple[list[int], int]:
    """Return the start of each group's slots, at a multiple of their bytes, and the end: a peer counts slots of a
    group from the beginning of the memory."""
    starts, end = list[int](), 0
    for stride in strides:
        starts.append(-(-end // stride) * stride)
        end = starts[-1] + slots * stride
    return starts, end


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _words(lines: Tensor, nbytes: int = 0) -> Tensor:
    """Return the same memory as integers, for checksums."""
    nbytes = nbytes or lines[0].nbytes
    dtype = next(dtype for dtype in (torch.int32, torch.int16, torch.uint8) if nbytes % dtype.itemsize == 0)
    return lines.view(dtype)
