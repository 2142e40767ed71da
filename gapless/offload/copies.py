"""Copies of pages in slots of host memory: their state, and their eviction. No torch here."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gapless.base.shared import PeerMemory
from gapless.memory.pages import PageListener, PagePool
from gapless.offload.tiers.seam import key_of


@dataclass(slots=True, eq=False)
class Lease:
    """Pages lent in a peer's memory, which may be overwritten after their return or deadline."""

    give_back: Callable[[], None]
    """Called after the last use of any copy"""
    late_at: int
    """Deadline of the return, ns of the device's clock"""
    copies: list[PageCopy] = field(default_factory=list)
    left: int = 0
    """Copies still in use"""
    holders: int = 0
    """Searches that wait for its pages"""
    memory: PeerMemory | None = None

    def leave(self) -> None:
        """Note the last use of one copy."""
        self.left -= 1
        if not self.left:
            self.memory = None  # lease and copies form a cycle: unmap now, not at garbage collection
            self.give_back()

    def leave_to_others(self) -> None:
        """Note the end of one search; after the last, unloaded pages are returned."""
        self.holders -= 1
        if not self.holders:
            self.end()

    def end(self) -> None:
        """Return the copies that no transfer uses."""
        for copy in self.copies:
            if not copy.pins:
                copy.lose()


NOWHERE = -1
"""Slot of a copy without a known place"""


@dataclass(slots=True, eq=False)
class PageCopy:
    """The copy of one page, in a slot of host memory; readable once it has a checksum."""

    group: GroupCopies
    digest: bytes
    slot: int
    """Our slot, or one in the lease's memory"""
    checksum: int | None = None
    pins: int = 1
    """Transfers that read or write it, first the one that fills it."""
    gone: bool = False
    """Whether it was evicted or doubted, and is no longer found."""
    source: int | None = None
    """Tier below that it was loaded from"""
    lease: Lease | None = None
    """Lease of a peer's page; it is loaded once"""

    @property
    def key(self) -> bytes:
        """The page's key in the tiers below."""
        return key_of(self.group.number, self.digest)

    def lose(self) -> None:
        """Drop it from the group; its slot is freed when no transfer uses it."""
        if not self.gone:
            del self.group.copies[self.digest]
            self.gone = True
            self._free_unless_pinned()

    def pin(self) -> None:
        """Add a pin: a transfer, a tier below or a peer uses the copy's slot."""
        self.group.pinned += not self.pins
        self.pins += 1

    def unpin(self) -> None:
        """Remove a transfer's pin."""
        self.pins -= 1
        self.group.pinned -= not self.pins
        self._free_unless_pinned()

    def _free_unless_pinned(self) -> None:
        if self.gone and not self.pins:
            if self.lease is None:
                self.group.free.append(self.slot)
            else:
                self.lease.leave()


@dataclass
class HostCounts:
    """Slots of the host tier over all page groups, and counts of pages since the start."""

    slots: int = 0
    used: int = 0
    pinned: int = 0
    """Copies in use by transfers, tiers below and peers, borrowed ones included: they cannot be evicted"""
    loading: int = 0
    """Pages of running loads to the device"""
    storing: int = 0

    hit: int = 0
    """Prompt pages, across groups, that the device lacked and this tier had"""
    missed: int = 0
    """Prompt pages computed nevertheless"""
    stored: int = 0
    loaded: int = 0
    refused: int = 0
    """Loaded, but not shared: the transfer failed, the checksum differed, or they were doubted meanwhile."""
    late: int = 0
    """Requests that stopped waiting for their load"""
    slower: int = 0
    """Requests whose load would have taken longer than computing"""
    dropped_full: int = 0
    """Pages not stored: transfers held every slot"""
    dropped_gone: int = 0
    """Pages not stored: they were evicted or doubted before"""
    dropped_failed: int = 0
    """Pages not stored: their transfer raised an error"""
    evicted: int = 0
    """Copies evicted for others"""
    read_bytes: int = 0
    written_bytes: int = 0
    read_ns: int = 0
    """Total time of transfers to the device, concurrent or not"""
    written_ns: int = 0


class GroupCopies(PageListener):
    """The copies of one page group, the least recently used first. Listens to the pool's index."""

    def __init__(self, number: int, pool: PagePool, slots: int, counts: HostCounts) -> None:
        self.number = number
        """The page group's number"""
        self.pool = pool
        self.size = slots
        self.free = list(range(slots - 1, -1, -1))
        self.copies: OrderedDict[bytes, PageCopy] = OrderedDict()
        self.pinned = 0
        """Copies in use by transfers, tiers below and peers"""
        self.fresh: deque[tuple[int, bytes]] = deque()
        """Pages to store, in order of publication."""
        self.doubted: Callable[[bytes], None] | None = None
        """Called with the key of a doubted page: tiers below may have it too."""
        self._counts = counts
        pool.watcher = self

    # Calls of the pool.

    def published(self, page: int, digest: bytes) -> None:
        """Queue an indexed page for its store; it is settled later."""
        if digest in self.copies:
            self.copies.move_to_end(digest)
        else:
            self.fresh.append((page, digest))

    def hidden(self, digest: bytes) -> None:
        """Drop the copies of a doubted page."""
        if (copy := self.copies.get(digest)) is not None:
            copy.lose()
        if self.doubted is not None:
            self.doubted(key_of(self.number, digest))

    def forgotten(self) -> None:
        self.fresh.clear()
        for copy in [*self.copies.values()]:
            copy.lose()

    # Copies.

    def find(self, digest: bytes) -> PageCopy | None:
        """Return the copy of this digest, if loadable."""
        copy = self.copies.get(digest)
        return copy if copy is not None and copy.checksum is not None else None

    def take(self, digest: bytes) -> PageCopy | None:
        """Return a new copy to fill, evicting the least recently used; None while transfers hold every slot."""
        if not self.free:
            idle = next((copy for copy in self.copies.values() if not (copy.pins or copy.lease)), None)
            if idle is None:
                return None
            self._counts.evicted += 1
            idle.lose()
        return self._entered(PageCopy(self, digest, self.free.pop()))

    def borrow(self, digest: bytes, lease: Lease) -> PageCopy:
        """Return a copy for a page of a peer."""
        copy = self._entered(PageCopy(self, digest, NOWHERE, lease=lease))
        lease.copies.append(copy)
        lease.left += 1
        return copy

    def _entered(self, copy: PageCopy) -> PageCopy:
        """Enter a copy with the pin of the transfer that fills it, and return it."""
        self.copies[copy.digest] = copy
        self.pinned += 1
        return copy
