"""Copies of pages in slots of host memory: which there are, which may be read, and which makes room. No torch here."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gapless.base.shared import PeerMemory
from gapless.memory.pages import PageListener, PagePool
from gapless.tiers.seam import key_of


@dataclass(slots=True, eq=False)
class Lease:
    """Pages in a peer's memory, which other pages may have there once they are given back, or late."""

    give_back: Callable[[], None]
    """Called when none of them is used any more"""
    late_at: int
    """When they have to be back, ns of the device's clock"""
    copies: list[PageCopy] = field(default_factory=list)
    left: int = 0
    """Copies that may still be used"""
    holders: int = 0
    """Searches that wait for them"""
    memory: PeerMemory | None = None

    def leave(self) -> None:
        """One of the copies is not used any more."""
        self.left -= 1
        if not self.left:
            self.memory = None  # lease and copies are a cycle: the mapping must not wait for garbage collection
            self.give_back()

    def leave_to_others(self) -> None:
        """One of the searches is over: what was not loaded goes back with the last."""
        self.holders -= 1
        if not self.holders:
            self.end()

    def end(self) -> None:
        """Give back what no transfer uses."""
        for copy in self.copies:
            if not copy.pins:
                copy.lose()


NOWHERE = -1
"""The slot of a copy whose place is not known yet"""


@dataclass(slots=True, eq=False)
class PageCopy:
    """The copy of one page, in a slot of host memory. It is readable when it has a checksum."""

    group: GroupCopies
    digest: bytes
    slot: int
    """A slot of ours, or one in the memory of the lease"""
    checksum: int | None = None
    pins: int = 1
    """Transfers that read or write it; it begins with the one that fills it."""
    gone: bool = False
    """Whether it is found no more: it made room, or what it holds is in doubt."""
    source: int | None = None
    """The tier below that it was loaded from"""
    lease: Lease | None = None
    """What it is part of where it is a peer's; it is loaded once"""

    @property
    def key(self) -> bytes:
        """The page's key in the tiers below."""
        return key_of(self.group.number, self.digest)

    def lose(self) -> None:
        """Forget it, so that it is not found again; its slot comes back when no transfer uses it."""
        if not self.gone:
            del self.group.copies[self.digest]
            self.gone = True
            self._free_unless_pinned()

    def pin(self) -> None:
        """Add a pin: a transfer, a tier below or a peer uses the copy's slot."""
        self.group.pinned += not self.pins
        self.pins += 1

    def unpin(self) -> None:
        """A transfer has left it alone for good."""
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
    """Pages since the start."""

    hit: int = 0
    """Pages of a prompt, whatever their groups, that the device lacked and this tier had"""
    missed: int = 0
    """Pages of a prompt that were computed all the same"""
    stored: int = 0
    loaded: int = 0
    refused: int = 0
    """Loaded, but the transfer failed, their checksum was another, or they had come in doubt meanwhile: not shared."""
    late: int = 0
    """Requests that no longer waited for their load"""
    slower: int = 0
    """Requests whose load was not begun, since it would take longer than computing"""
    dropped_full: int = 0
    """Pages that were not stored, since transfers held every slot"""
    dropped_gone: int = 0
    """Pages that were not stored, since they were given away, or came in doubt, before that"""
    dropped_failed: int = 0
    """Pages that were not stored, since their transfer raised an error"""
    evicted: int = 0
    """Copies that made room for others"""


class GroupCopies(PageListener):
    """The copies of one page group, the least recently used first. Hears what happens to the pool's pages."""

    def __init__(self, number: int, pool: PagePool, slots: int, counts: HostCounts) -> None:
        self.number = number
        """The page group's number"""
        self.pool = pool
        self.size = slots
        self.free = list(range(slots - 1, -1, -1))
        self.copies: OrderedDict[bytes, PageCopy] = OrderedDict()
        self.pinned = 0
        """Copies that transfers, tiers below and peers use"""
        self.fresh: deque[tuple[int, bytes]] = deque()
        """Pages to store, in the order in which they were published."""
        self.doubted: Callable[[bytes], None] | None = None
        """Called with the key of a page that is in doubt: tiers below may have it too."""
        self._counts = counts
        pool.watcher = self

    # What the pool says.

    def published(self, page: int, digest: bytes) -> None:
        """The page is indexed; it is settled later."""
        if digest in self.copies:
            self.copies.move_to_end(digest)
        else:
            self.fresh.append((page, digest))

    def hidden(self, digest: bytes) -> None:
        """What the page of this digest holds is in doubt, and so are its copies."""
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
        """Return the copy of this digest, if it may be loaded."""
        copy = self.copies.get(digest)
        return copy if copy is not None and copy.checksum is not None else None

    def take(self, digest: bytes) -> PageCopy | None:
        """Return a new copy, to be written; None while transfers hold every slot. Evicts the least recently used."""
        if not self.free:
            idle = next((copy for copy in self.copies.values() if not (copy.pins or copy.lease)), None)
            if idle is None:
                return None
            self._counts.evicted += 1
            idle.lose()
        return self._entered(PageCopy(self, digest, self.free.pop()))

    def borrow(self, digest: bytes, lease: Lease) -> PageCopy:
        """Return a copy that will be a peer's."""
        copy = self._entered(PageCopy(self, digest, NOWHERE, lease=lease))
        lease.copies.append(copy)
        lease.left += 1
        return copy

    def _entered(self, copy: PageCopy) -> PageCopy:
        """Enter a copy, which has the pin of the transfer that fills it, and return it."""
        self.copies[copy.digest] = copy
        self.pinned += 1
        return copy
