"""The host tier: which settled pages have a copy in host memory, and which transfer comes next. No torch here.

Pages are stored when the step that filled them was observed, and loaded before a request is admitted. A copy is found
by its digest; it has a checksum, which a loaded page must have again before any step may read it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import PagePool, Pin

LEAST_TOKENS = 256
"""A load brings at least this many tokens: it is noticed between two steps, and fewer are recomputed in less."""
LATE_NS = 1_000_000_000
"""A request that has waited for a load this long computes its prompt."""
BATCH_PAGES = 32
"""Pages of one transfer, at most; a direction has one transfer at a time."""


class PageCopy:
    """The copy of one page, in a slot of host memory. It is readable when it has a checksum."""

    __slots__ = ("checksum", "digest", "gone", "pins", "slot")

    def __init__(self, digest: bytes, slot: int) -> None:
        self.digest = digest
        self.slot = slot
        self.checksum: int | None = None
        self.pins = 1
        """Transfers that read or write it; it begins with that of its store."""
        self.gone = False
        """Whether what it holds is in doubt: it is found no more."""


class PageMove(NamedTuple):
    """One page on its way between the device and its copy."""

    group: int
    page: int
    copy: PageCopy


class MoveBatch(NamedTuple):
    """Pages that move together, in one direction."""

    number: int
    """The number of the transfer on its clock"""
    moves: list[PageMove]


class LoadTicket(NamedTuple):
    """What a request waits for."""

    pages: int
    """It goes on when this many pages in all have been loaded or refused,"""
    late_at: int
    """or at this time of the device's clock, ns."""


@dataclass
class HostCounts:
    """Pages since the start."""

    stored: int = 0
    loaded: int = 0
    refused: int = 0
    """Loaded, but their checksum was another or they had come in doubt meanwhile: they were not shared."""
    late: int = 0
    """Requests that no longer waited for their load"""
    dropped_full: int = 0
    """Pages that were not stored, since transfers held every slot"""
    dropped_gone: int = 0
    """Pages that were not stored, since they were given away, or came in doubt, before that"""
    evicted: int = 0
    """Copies that made room for others"""


class GroupCopies:
    """The copies of one page group, the least recently used first. Hears what happens to the pool's pages."""

    def __init__(self, pool: PagePool, slots: int, counts: HostCounts) -> None:
        self.pool = pool
        self.size = slots
        self.free = list(range(slots - 1, -1, -1))
        self.copies: OrderedDict[bytes, PageCopy] = OrderedDict()
        self.fresh: deque[tuple[int, bytes]] = deque()
        """Pages to store, in the order in which they were published."""
        self.coming: set[bytes] = set()
        """Digests whose pages are being loaded."""
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
        """What the page of this digest holds is in doubt, and so is its copy."""
        copy = self.copies.pop(digest, None)
        if copy is not None:
            copy.gone = True
            self._free_unless_pinned(copy)

    def forgotten(self) -> None:
        """The index was emptied."""
        self.fresh.clear()
        for digest in [*self.copies]:
            self.hidden(digest)

    # Copies.

    def find(self, digest: bytes) -> PageCopy | None:
        """Return the copy of this digest, if it may be loaded."""
        copy = self.copies.get(digest)
        return copy if copy is not None and copy.checksum is not None else None

    def take(self, digest: bytes) -> PageCopy | None:
        """Return a new copy, to be written; None while transfers hold every slot. Evicts the least recently used."""
        if not self.free:
            idle = next((copy for copy in self.copies.values() if not copy.pins), None)
            if idle is None:
                return None
            self._counts.evicted += 1
            self.hidden(idle.digest)
        copy = self.copies[digest] = PageCopy(digest, self.free.pop())
        return copy

    def unpin(self, copy: PageCopy) -> None:
        """A transfer has left the copy alone for good."""
        copy.pins -= 1
        self._free_unless_pinned(copy)

    def _free_unless_pinned(self, copy: PageCopy) -> None:
        if copy.gone and not copy.pins:
            self.free.append(copy.slot)


class HostTier:
    """Decides what is stored and loaded next. `step.transfers` moves it and says when it has arrived."""

    def __init__(
        self, pools: Sequence[PagePool], ledger: Ledger, slots: int, clock: Callable[[], int],
        least_tokens: int = LEAST_TOKENS, late_ns: int = LATE_NS,
    ) -> None:  # fmt: skip
        """Each group has `slots` copies. A load brings at least `least_tokens`, and is late after `late_ns`."""
        assert slots > 0, "a host tier without slots"
        self.counts = HostCounts()
        self.groups = [GroupCopies(pool, slots, self.counts) for pool in pools]
        self._group_of = dict(zip(pools, self.groups, strict=True))
        self._ledger = ledger
        self._clock = clock
        self._late_ns = late_ns
        self.least_pages = max(1, -(-least_tokens // pools[0].page_size))
        self._waiting: deque[PageMove] = deque()
        """Loads that are not begun; their pages and copies are pinned."""
        self._asked = self._ended = 0
        """Pages whose load was asked for, and whose load has ended."""
        self._stores = self._loads = 0
        """Transfers begun"""

    # For the planner.

    def has(self, pool: PagePool, digest: bytes) -> bool:
        """Return whether the page of this digest can be loaded, or is being."""
        return self._group_of[pool].find(digest) is not None

    def load(self, missing: Sequence[tuple[PagePool, bytes]]) -> LoadTicket:
        """Load these pages, which the tier has and the index lacks; the pools have room for them."""
        for pool, digest in missing:
            group = self._group_of[pool]
            copy = group.find(digest)
            assert copy is not None, "a load of what the tier lacks"
            if digest not in group.coming:
                group.coming.add(digest)
                group.copies.move_to_end(digest)
                copy.pins += 1
                self._waiting.append(PageMove(self.groups.index(group), pool.take(Pin.LOAD), copy))
                self._asked += 1
        return LoadTicket(self._asked, self._clock() + self._late_ns)

    def loads(self, ticket: LoadTicket) -> bool:
        """Return whether a request should still wait for its load."""
        if self._ended >= ticket.pages:
            return False
        if self._clock() < ticket.late_at:
            return True
        self.counts.late += 1
        return False

    # For the transfers.

    @property
    def busy(self) -> bool:
        """Return whether something is to be stored or loaded that is not on its way."""
        return bool(self._waiting) or any(group.fresh for group in self.groups)

    def next_store(self) -> MoveBatch | None:
        """Begin the next transfer of settled pages to their copies, if there are some."""
        moves: list[PageMove] = []
        for number, group in enumerate(self.groups):
            while group.fresh and len(moves) < BATCH_PAGES:
                page, digest = group.fresh[0]
                known = group.pool.digest_of.get(page) == digest
                if known and not group.pool.settled(page):
                    break
                group.fresh.popleft()
                if not known:
                    self.counts.dropped_gone += 1
                elif digest not in group.copies and (copy := self._room(group, digest)) is not None:
                    group.pool.pin(page, Pin.STORE)
                    moves.append(PageMove(number, page, copy))
        if not moves:
            return None
        self._stores += 1
        at = ((Clock.BULK_OUT, self._stores),)
        for move in moves:
            self.groups[move.group].pool.unpin(move.page, at, Pin.STORE)
        return MoveBatch(self._stores, moves)

    def _room(self, group: GroupCopies, digest: bytes) -> PageCopy | None:
        copy = group.take(digest)
        self.counts.dropped_full += copy is None
        return copy

    def stored(self, batch: MoveBatch, checksums: Sequence[int]) -> None:
        """The host has seen the end of a transfer to the copies; `checksums` are those of the pages, in order."""
        for move, checksum in zip(batch.moves, checksums, strict=True):
            move.copy.checksum = checksum
            self.groups[move.group].unpin(move.copy)
        self.counts.stored += len(batch.moves)
        self._ledger.advance(Clock.BULK_OUT, batch.number)

    def next_load(self) -> MoveBatch | None:
        """Begin the next transfer of copies to their pages, if there are some."""
        moves = [self._waiting.popleft() for _ in range(min(BATCH_PAGES, len(self._waiting)))]
        if not moves:
            return None
        self._loads += 1
        for move in moves:
            self.groups[move.group].pool.fill(move.page, move.copy.digest, self._loads)
        return MoveBatch(self._loads, moves)

    def loaded(self, batch: MoveBatch, checksums: Sequence[int]) -> None:
        """The host has seen the end of a transfer to the pages; `checksums` are those of what arrived, in order.

        A page is shared if that is what was stored, and still stands for its digest. Otherwise it comes back empty,
        and its copy is dropped: no request asks for it again.
        """
        for move, checksum in zip(batch.moves, checksums, strict=True):
            group, copy = self.groups[move.group], move.copy
            good = not copy.gone and copy.checksum == checksum
            self.counts.loaded += good
            if not good:
                self.counts.refused += 1
                group.pool.refuse(move.page)
                if not copy.gone:
                    group.hidden(copy.digest)
            group.coming.discard(copy.digest)
            group.unpin(copy)
        self._ended += len(batch.moves)
        self._ledger.advance(Clock.BULK_IN, batch.number)

    # What may be seen.

    def used(self) -> int:
        """Return how many slots hold copies, of all groups."""
        return sum(group.size - len(group.free) for group in self.groups)

    def totals(self) -> dict[str, Any]:
        """Return sizes and counts by the names of engine.seam.Stats."""
        counts = {f"tier_{name}": count for name, count in vars(self.counts).items()}
        return {"tier_slots": sum(group.size for group in self.groups), "tier_used": self.used(), **counts}

    def check(self) -> None:
        """Assert the accounting of slots (tests, debugging)."""
        pinned = {id(move.copy): move.copy for move in self._waiting}
        for group in self.groups:
            held = [copy.slot for copy in group.copies.values()]
            held += [copy.slot for copy in pinned.values() if copy.gone]
            assert not set(held) & set(group.free), "a slot is free and holds a copy"
            assert len(held) == len(set(held)) and len(group.free) == len(set(group.free)), "a slot is held twice"
