"""Moves pages between the device and their copies in host memory, beside the steps that run.

Each direction has a stream of its own. A transfer is one operation for any number of pages, so that beginning it takes
the loop little time. No step waits for one: a store reads pages whose step the host has observed, tokens included, and
a load writes pages that no step in flight can reach, so the host's own order suffices.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.base.errors import DeviceError
from gapless.base.records import Int64s
from gapless.base.shared import Bytes, PeerMemory, SharedMemory
from gapless.device import Device, Fence, Stream
from gapless.device.ring import PAGE, RingSlot, host_bytes
from gapless.kernels import pages as reference
from gapless.memory.copies import HostCounts, Lease, PageCopy
from gapless.memory.gate import HOST
from gapless.memory.host import BATCH_PAGES, HostTier, MoveBatch, PageMove
from gapless.memory.pages import NULL_PAGE
from gapless.model.seam import KVCache

log = logging.getLogger("gapless.tiers")

MOST_BATCH = 256
"""Pages of one transfer, at most"""
MOST_AT_REST = 2
"""Transfers of one direction that may be under way where no row runs. Where no peer takes pages it is one for stores:
pages that wait for their store cannot be given away."""
AT_REST = 64
"""Pages of one load, or of all stores under way, where no row runs: small transfers end early, and serve early"""
HOST_SHARE = 0.1
"""What transfers of both directions together may take of the loop's time between two looks at them"""
ONE_STRETCH_NS = 1_000_000
"""A transfer that begins within this time after the one before is shown as one with it."""

Words = list[Tensor]
"""One tensor a page group, [pages or slots, words]: a page as words of 4 bytes, or the largest that fit it."""

CopyPages = Callable[[Tensor, Tensor, Tensor, Tensor], None]
Parts = list[tuple[Tensor, Tensor, Tensor]]
"""Source, destination and places, for each page group of a transfer"""


def slot_bytes(cache: KVCache) -> int:
    """Return the bytes of one host slot of every page group: whole pages of the operating system."""
    return sum(_stride(memory) for memory in (cache.data, *cache.others))


class Transfers:
    """Owns the host tier's memory, and the transfers on their way. `poll` never waits."""

    def __init__(
        self, device: Device, cache: KVCache, host: HostTier, copy_pages: CopyPages, shares: bool = False
    ) -> None:
        """`copy_pages` is that of the kernels. `shares` is whether peers may map the host's memory."""
        self.host = host
        self.adopt = device.adopt
        """Lets transfers read the memory of a peer"""
        self._device = device
        every = (cache.data, *cache.others)
        pages = [_words(memory.flatten(1)) for memory in every]
        self.slots: Words = []
        """The host's memory"""
        self.memory: list[memoryview] = []
        """The host's memory by bytes, a buffer a group: slot after slot, each of whole pages of the operating system"""
        sizes = [(group.size, _stride(memory)) for group, memory in zip(host.groups, every, strict=True)]
        starts, nbytes = _starts(sizes)
        self.shared = SharedMemory(nbytes) if shares else None
        arena = device.host_memory(nbytes, None if self.shared is None else torch.from_numpy(self.shared.data))
        for (size, stride), start, memory in zip(sizes, starts, every, strict=True):
            raw = arena[start : start + size * stride].view(size, stride)
            self.slots.append(_words(raw[:, : memory[0].nbytes], memory[0].nbytes))
            self.memory.append(host_bytes(raw))
        self.bulk_out = TransferWay(device, device.bulk_out, True, copy_pages, pages, self.slots)
        self.bulk_in = TransferWay(device, device.bulk_in, False, copy_pages, pages, self.slots)
        self._polled_at = device.clock()
        self.page_ns = 0.0
        """Time of the loop's thread for each page, in the latest look that began transfers"""
        observe.built(self)

    @property
    def busy(self) -> bool:
        """Return whether a transfer is on its way or has to begin."""
        news = bool(self.host.below.lines) and self.host.below.has_news
        return bool(self.bulk_in.underway or self.bulk_out.underway) or self.host.busy or news

    def poll(self) -> bool:
        """Take in what has ended, and begin the next transfer of each direction. Returns as `take`."""
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
            while len(way.underway) < count and (batch := following(self.most(passed, begun, rest))) is not None:
                begun += way.begin(batch, since)
                if way is self.bulk_in or self.host.below.gives:
                    way.stream.ring(self._device.bell)  # a request, or a peer, waits for it
                since = self._device.clock()
        if begun:
            self.page_ns = (self._device.clock() - self._polled_at) / begun
        return came

    def most(self, passed: int, begun: int = 0, rest: int = AT_REST) -> int:
        """Return how many pages a transfer may have, `passed` ns after the look before, where this look has `begun` to
        move others; `rest` where no row runs. Beside running rows a look comes when a step or a load has ended, so
        there may be more where these are long, and a few where they are short, so that each direction goes on."""
        if not self.page_ns:
            return BATCH_PAGES
        pages = int(HOST_SHARE * passed / self.page_ns) - begun if self.host.running else rest
        return max(BATCH_PAGES, min(MOST_BATCH, pages))

    def take(self) -> bool:
        """Take in transfers that have ended, and what has come from tiers below. Returns whether there was something:
        what waited for it may be planned now."""
        loaded, stored = self.bulk_in.ended(), self.bulk_out.ended()
        if loaded is not None:
            seen_at = self._device.clock()
            self.host.loaded(*loaded)
            took = self.bulk_in.took_ns + self._device.clock() - seen_at  # what it takes the loop is part of it
            self.host.gate.moved(HOST, len(loaded[0].moves), took)
        if stored is not None:
            self.host.stored(*stored)
        came = bool(self.host.below.lines) and self.host.below.poll()
        return came or loaded is not None or stored is not None

    def stretches(self) -> tuple[int, int, int, int]:
        """Return when pages moved to the device, from and until, and from it, since the last call; zeros for never."""
        return *self.bulk_in.stretch(), *self.bulk_out.stretch()

    def totals(self) -> dict[str, Any]:
        """Return what was moved and is moved now, by the names of engine.seam.Stats."""
        ways = {"read": self.bulk_in, "written": self.bulk_out}
        moved = {f"tier_{name}_{unit}": getattr(way, unit) for name, way in ways.items() for unit in ("bytes", "ns")}
        moving = {"tier_loading": self.bulk_in.moving, "tier_storing": self.bulk_out.moving}
        return {**self.host.totals(), **moved, **moving}

    def slot(self, group: int, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        memory, stride = self.memory[group], self.stride(group)
        return memory[slot * stride : (slot + 1) * stride]

    def stride(self, group: int) -> int:
        """Return the bytes of one slot of a group."""
        return len(self.memory[group]) // self.host.groups[group].size

    def wait_for_loads(self, bell: Bell, seconds: float) -> bool:
        """Begin what was just asked for, and wait for it or the bell, at most `seconds` for a tier below; return
        whether something has ended or was waited for. Only the loop's observe does."""
        if self.wait(bell):
            return True
        patience = self.host.below.patience()
        if patience is not None:
            bell.wait(min(seconds, patience))
        return patience is not None

    def warm_up(self) -> None:
        """Move null pages there and back, and wait: what copies and kernels fetch for themselves, they then have. How
        long they take after that is what the gate begins with; what warm-up requests have counted is forgotten."""
        moves = [
            PageMove(number, NULL_PAGE, PageCopy(group, b"", slot % group.size))
            for slot in range(BATCH_PAGES) for number, group in enumerate(self.host.groups)
        ]  # fmt: skip
        vars(self.host.counts).update(vars(HostCounts()))
        self.host.gate = self.host.gate.fresh()
        null = MoveBatch(0, moves[:MOST_BATCH])  # of all groups, however many there are
        for way in (self.bulk_out, self.bulk_in, self.bulk_in):
            way.begin(null, self._device.clock())
            self._device.drain()
            if (ended := way.ended()) is None or None in ended[1]:
                raise DeviceError("no page can be moved between the device and the host: the line before says why")
            if way is self.bulk_in:
                self.host.gate.moved(HOST, len(null.moves), way.took_ns)
            way.bytes = way.ns = 0
            way.stretch()

    def wait(self, bell: Bell) -> bool:
        """Begin what comes next, and wait for a transfer on its way, a load first, or the bell; return whether
        something has ended or was waited for. Only the loop's observe does."""
        if self.poll():
            return True
        for way in (self.bulk_in, self.bulk_out):
            if way.underway:
                way.underway[0].fence.wait(bell)
                return True
        return False


class Underway(NamedTuple):
    """A transfer on its way."""

    batch: MoveBatch
    fence: Fence
    slot: int
    """Which memory for places and checksums it has"""
    since: int
    """When its preparation began, ns of the device's clock; `began` is when it was given to the device"""
    began: int
    errors: list[Exception]
    """What its program has raised"""


class TransferWay:
    """One direction: from the device where it `stores`, to the device otherwise."""

    def __init__(
        self, device: Device, stream: Stream, stores: bool, copy_pages: CopyPages, pages: Words, slots: Words
    ) -> None:
        self._device, self.stream, self._stores, self.copy_pages = device, stream, stores, copy_pages
        self._src, self._dst = (pages, slots) if stores else (slots, pages)
        self._page_bytes = [memory[0].nbytes for memory in pages]
        self._peers: WeakKeyDictionary[PeerMemory, Words] = WeakKeyDictionary()
        """The memory of peers that lend pages"""
        self.sums = torch.zeros(MOST_BATCH, dtype=torch.int64, device=device.torch_device)
        """The checksums of the transfer that runs: of a direction, one runs at a time"""
        self.arrived = device.ring(MOST_AT_REST, 8 * MOST_BATCH).slots
        """The checksums on the host"""
        self.places = device.ring(MOST_AT_REST, 8 * MOST_BATCH).slots
        """Pages and slots of the transfers on their way, int32 [2, count] for each group after the other"""
        self.underway: deque[Underway] = deque()
        self._begun = 0
        self.bytes = self.ns = self.took_ns = 0
        """What transfers have moved, how long they were on their way, since the start, and how long the latest was with
        its preparation"""
        self._ended = self._from = self._until = 0

    @property
    def moving(self) -> int:
        """Pages on their way"""
        return sum([len(one.batch.moves) for one in self.underway])

    def stretch(self) -> tuple[int, int]:
        """Return from and until when the latest transfers ran, of those that have ended since the last call."""
        found, self._from, self._until = (self._from, self._until), 0, 0
        return found

    def begin(self, batch: MoveBatch, since: int) -> int:
        """Begin a transfer, whose preparation has begun at time `since`; return its pages."""
        began, count, slot = self._device.clock(), len(batch.moves), self._begun % MOST_AT_REST
        batch = batch._replace(moves=sorted(batch.moves, key=_source))
        places, sums, errors = self.places[slot], self.sums[:count], list[Exception]()
        arrived = self.arrived[slot].tensor.view(torch.int64)[:count]
        parts = self._parts(batch.moves, places)
        self.stream.launch(self._run, parts, sums, arrived, errors, reads=(places,), writes=(sums, arrived))
        self.underway.append(Underway(batch, self.stream.record(timed=True), slot, since, began, errors))
        self._begun += 1
        return count

    def _parts(self, moves: Sequence[PageMove], slot: RingSlot) -> Parts:
        """Write down where the pages of each group are, and where they go."""
        places, tensor, parts, first = slot.array.view(np.int32), slot.tensor.view(torch.int32), Parts(), 0
        for (group, _), some in groupby(moves, _source):
            alike = [*some]
            ends = [(move.page, move.copy.slot) for move in alike]
            here = slice(2 * first, 2 * (first + len(ends)))
            places[here] = np.array(ends, np.int32).T[:: 1 if self._stores else -1].reshape(-1)
            parts.append((self.sources(alike[0].copy.lease)[group], self._dst[group], tensor[here].view(2, -1)))
            first += len(ends)
        return parts

    def sources(self, lease: Lease | None) -> Words:
        """Return where pages come from, by group: the peer's memory where they are lent."""
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

    def _run(self, parts: Parts, sums: Tensor, arrived: Tensor, errors: list[Exception]) -> None:
        """Copy all pages. What that raises fails this transfer, and not the device."""
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
        """Return the oldest transfer, if it has ended, and the checksums of its pages: None where it failed."""
        if not self.underway or not self.underway[0].fence.done():
            return None
        one = self.underway.popleft()
        self._count(one, one.fence.time())
        moves = one.batch.moves
        for error in one.errors:
            log.warning("a transfer of %d pages failed: %s: %s", len(moves), type(error).__name__, error)
            return one.batch, [None] * len(moves)
        sums: Int64s = self.arrived[one.slot].array.view(np.int64)
        return one.batch, sums[: len(moves)].tolist()

    def _count(self, one: Underway, until: int) -> None:
        self.bytes += sum([self._page_bytes[move.group] for move in one.batch.moves])
        self.took_ns = until - max(one.since, self._ended)  # without the wait for the one before it
        self.ns += until - max(one.began, self._ended)
        if not self._until or one.began - self._until > ONE_STRETCH_NS:
            self._from = one.began
        self._until = self._ended = until


def _source(move: PageMove) -> tuple[int, int]:
    """Return equal values for pages of one group in one memory."""
    return move.group, 0 if move.copy.lease is None else id(move.copy.lease.memory)


def writable(data: Bytes) -> Bytes:
    """Return the same memory without the mark that it is only read, which torch has no use for."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * len(data)).from_address(data.ctypes.data))


def _starts(sizes: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return where the slots of each group begin, given their count and bytes, at a multiple of these, and their end:
    a peer counts slots of a group from the beginning of the memory."""
    starts, end = list[int](), 0
    for count, stride in sizes:
        starts.append(-(-end // stride) * stride)
        end = starts[-1] + count * stride
    return starts, end


def _stride(memory: Tensor) -> int:
    return _rounded(memory[0].nbytes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _words(lines: Tensor, nbytes: int = 0) -> Tensor:
    """Return the same memory as integers, of which there are checksums."""
    nbytes = nbytes or lines[0].nbytes
    dtype = next(dtype for dtype in (torch.int32, torch.int16, torch.uint8) if nbytes % dtype.itemsize == 0)
    return lines.view(dtype)
