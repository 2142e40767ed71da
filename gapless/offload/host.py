"""The host tier: copies of settled pages in host memory, and the next transfers. No torch here.

Pages are stored after the step that filled them was observed, and loaded before a request is admitted. A copy is found
by its digest, and has a checksum that a loaded page must match before any step may read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gapless.base.records import KVTransfer
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import PagePool, Pin
from gapless.offload.below import LOOKUP_NS, LowerTiers
from gapless.offload.copies import GroupCopies, HostCounts, PageCopy
from gapless.offload.search import LoadTicket, Search
from gapless.offload.tiers.seam import key_of
from gapless.offload.tiers.worker import TierWorker
from gapless.pace.load_gate import LoadGate

LATE_NS = 1_000_000_000
"""[ns] A waiting request computes its prompt after this time without an ended load."""
BATCH_PAGES = 32
"""[pages] Usual pages of one transfer"""


class PageMove(NamedTuple):
    """One page in transfer between the device and its copy."""

    group: int
    page: int
    copy: PageCopy


class MoveBatch(NamedTuple):
    """Pages that move together, in one direction."""

    number: int
    """Number of the transfer on its clock"""
    moves: list[PageMove]


class PageLoad(NamedTuple):
    """A copy to load, and the tickets of the waiting requests."""

    copy: PageCopy
    tickets: list[LoadTicket]


class HostTier:
    """Chooses the next stores and loads. `offload.transfers` moves the pages and reports their arrival."""

    def __init__(
        self, pools: Sequence[PagePool], ledger: Ledger, slots: int, clock: Callable[[], int], late_ns: int = LATE_NS,
        gate: LoadGate | None = None,
    ) -> None:  # fmt: skip
        """Each group has `slots` copies. A load is late after `late_ns`, and begins if it pays by `gate`; without a
        gate, always."""
        assert slots > 0, "a host tier without slots"
        self.counts = HostCounts()
        self.groups = [GroupCopies(number, pool, slots, self.counts) for number, pool in enumerate(pools)]
        self._group_of = dict(zip(pools, self.groups, strict=True))
        self._ledger = ledger
        self._clock = clock
        self._late_ns = late_ns
        self.gate = gate or LoadGate(weighs=False)
        self.running = 0
        """Number of running rows: each may need a page at any step, so loads leave as many."""
        self._waiting: deque[PageLoad] = deque()
        """Loads not yet begun. Their copies are pinned; they get pages when they begin."""
        self._coming: dict[tuple[int, bytes], PageLoad] = {}
        """Unfinished loads, by group and digest"""
        self._stores = self._loads = 0
        """Numbers of transfers begun"""
        self._progress_at = 0
        """Time of the last ended load"""
        self._ending: list[tuple[str, list[bytes]]] = []
        """Ended requests that peers wait for, by name, with the digests of their pages"""
        self.below = LowerTiers((), lambda group, slot: memoryview(b""), clock, late_ns, LOOKUP_NS, self.gate)
        """Tiers with the pages evicted here; none before `attach`"""

    def attach(
        self, lines: Sequence[TierWorker], slot: Callable[[int, int], memoryview], lookup_ns: int | None = None
    ) -> LowerTiers:
        """Attach the tiers of `lines` for stores and loads; `slot` returns a group's slot."""
        self.below = LowerTiers(lines, slot, self._clock, self._late_ns, lookup_ns or LOOKUP_NS, self.gate)
        for group in self.groups:
            group.doubted = self.below.drop
        return self.below

    # For rows that wait.

    def has(self, pool: PagePool, digest: bytes) -> bool:
        """Return whether the page of this digest is loadable."""
        return self._group_of[pool].find(digest) is not None

    def load(self, missing: Sequence[tuple[PagePool, bytes]]) -> LoadTicket:
        """Load these pages, which the tier has and the index lacks, after all earlier loads."""
        ticket = LoadTicket(self._clock())
        for pool, digest in missing:
            load = self._load_of(self._group_of[pool], digest)
            load.tickets.append(ticket)
            ticket.left += 1
        if self.below.tiers:
            self.below.touch([self.key(pool, digest) for pool, digest in missing])
        return ticket

    def _load_of(self, group: GroupCopies, digest: bytes) -> PageLoad:
        place = group.number, digest
        if place not in self._coming:
            copy = group.find(digest)
            assert copy is not None, "a load of what the tier lacks"
            group.copies.move_to_end(digest)
            copy.pin()
            self._coming[place] = load = PageLoad(copy, [])
            self._waiting.append(load)
        return self._coming[place]

    def load_early(self, search: Search) -> int:
        """Load the pages that a running search has brought so far; return how many prompt pages they are."""
        came = [copy for copy in search.came if not copy.gone and copy.group.pool.find(copy.digest) is None]
        search.came.clear()
        if came:
            search.tickets.append(self.load([(copy.group.pool, copy.digest) for copy in came]))
        return len({copy.digest for copy in came})

    def ask(
        self, pages: Sequence[tuple[PagePool, bytes]], held: Sequence[tuple[PagePool, bytes]], transfer: KVTransfer
    ) -> Search:  # fmt: skip
        """Ask the tiers below for these pages, which follow the `held` ones, here or on the device."""
        for pool, digest in held:
            if digest in (copies := self._group_of[pool].copies):
                copies.move_to_end(digest)  # loads must not take its slot
        return self.below.ask([(self._group_of[pool], digest) for pool, digest in pages], transfer)

    def key(self, pool: PagePool, digest: bytes) -> bytes:
        """Return the key of a page for the tiers below."""
        return key_of(self._group_of[pool].number, digest)

    def fetch(self, search: Search, missing: Sequence[tuple[PagePool, bytes]]) -> bool:
        """Have the tiers below load the pages missing here; False if they have none of them."""
        wanted = [(self._group_of[pool], digest) for pool, digest in missing]
        if not search.found or all([group.find(digest) for group, digest in wanted]):
            return False
        self.below.fetch(search, wanted)
        return True

    def end(self, name: str, digests: Sequence[bytes]) -> None:
        """End a request that peers wait for: they get the pages of these digests, or, without digests, no more than
        they have."""
        if not digests or not self.below.tiers:
            self.below.end(name, whole=False)
            return
        for group in self.groups:
            for digest in digests:
                if (copy := group.find(digest)) is not None:
                    if copy.lease is None:  # a lent copy is not ours to give
                        self.below.give(copy)
                elif digest not in group.copies and (page := group.pool.find(digest)) is not None:
                    group.fresh.append((page, digest))  # its copy was evicted
        self._ending.append((name, [*digests]))
        self._end_stored()

    def _end_stored(self) -> None:
        """End requests whose pages have all been offered to the tiers below, or never will be."""
        fresh = {digest for group in self.groups for _, digest in group.fresh}

        def comes(digest: bytes) -> bool:
            copies = [group.copies.get(digest) for group in self.groups]
            return digest in fresh or any([copy is not None and copy.checksum is None for copy in copies])

        for name, digests in [*self._ending]:
            if not any(map(comes, reversed(digests))):  # the last ones come last
                self._ending.remove((name, digests))
                self.below.end(name, whole=True)

    def waits(self, ticket: LoadTicket | Search) -> bool:
        """Return whether a request should still wait for its load."""
        if isinstance(ticket, Search):
            return self.below.waits(ticket)
        if not ticket.left:
            return False
        if self._clock() < max(ticket.asked_at, self._progress_at) + self._late_ns:
            return True
        self.counts.late += 1
        ticket.given_up = True
        return False

    @property
    def loading(self) -> bool:
        """Return whether a load is running; its pages are shareable afterwards."""
        return self._loads > self._ledger.passed[Clock.BULK_IN]

    # For the transfers.

    @property
    def busy(self) -> bool:
        """Return whether a store or load waits to begin."""
        return bool(self._waiting or self._ending) or any(group.fresh for group in self.groups)

    def next_store(self, most: int = BATCH_PAGES) -> MoveBatch | None:
        """Begin the next transfer of up to `most` settled pages to their copies, if any."""
        if self._ending:
            self._end_stored()
        moves: list[PageMove] = []
        at = Clock.BULK_OUT, self._stores + 1
        for number, group in enumerate(self.groups):
            first = len(moves)
            while group.fresh and len(moves) < most:
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
            group.pool.unpin([move.page for move in moves[first:]], at, Pin.STORE)
        if not moves:
            return None
        self._stores += 1
        return MoveBatch(self._stores, moves)

    def _room(self, group: GroupCopies, digest: bytes) -> PageCopy | None:
        copy = group.take(digest)
        self.counts.dropped_full += copy is None
        return copy

    def stored(self, batch: MoveBatch, checksums: Sequence[int | None]) -> None:
        """Take in an ended transfer to the copies; `checksums` are the pages', in order, None for a failed transfer."""
        for move, checksum in zip(batch.moves, checksums, strict=True):
            copy = move.copy
            copy.checksum = checksum
            if checksum is None:
                copy.lose()
            self.counts.stored += checksum is not None
            self.counts.dropped_failed += checksum is None
            copy.unpin()
            if self.below.tiers and not copy.gone:
                self.below.offer(copy)
        self._ledger.advance(Clock.BULK_OUT, batch.number)

    def next_load(self, most: int = BATCH_PAGES) -> MoveBatch | None:
        """Begin the next transfer of up to `most` copies to pages, if a request waits for any and pages are
        available."""
        moves: list[PageMove] = []
        while self._waiting and len(moves) < most:
            load = self._waiting[0]
            copy, pool = load.copy, load.copy.group.pool
            wanted = pool.find(copy.digest) is None and not all([ticket.given_up for ticket in load.tickets])
            if copy.lease is not None and self._clock() > copy.lease.late_at:
                wanted = False  # it must be returned
            if wanted and pool.available() <= self.running:
                break
            self._waiting.popleft()
            if wanted:
                moves.append(PageMove(copy.group.number, pool.take(Pin.LOAD), copy))
            else:
                self._end(load)
        if not moves:
            return None
        self._loads += 1
        for number, group in enumerate(self.groups):
            group.pool.fill({move.page: move.copy.digest for move in moves if move.group == number}, self._loads)
        return MoveBatch(self._loads, moves)

    def _end(self, load: PageLoad) -> None:
        del self._coming[load.copy.group.number, load.copy.digest]
        for ticket in load.tickets:
            ticket.left -= 1
        if load.copy.lease is not None:
            load.copy.lose()
        load.copy.unpin()

    def loaded(self, batch: MoveBatch, checksums: Sequence[int | None]) -> None:
        """Take in an ended transfer to the pages; `checksums` are the arrived pages', in order, None for a failed
        transfer.

        A page is shared if its checksum matches and its copy was not doubted meanwhile. Otherwise the page is returned
        empty and its copy dropped, so that no request loads it again.
        """
        for move, checksum in zip(batch.moves, checksums, strict=True):
            copy = move.copy
            good = not copy.gone and copy.checksum == checksum
            self.counts.loaded += good
            if not good:
                copy.group.pool.refuse(move.page)
                self._doubt(copy, checksum)
        self._progress_at = self._clock()
        self._ledger.advance(Clock.BULK_IN, batch.number)
        # Last, since copies must exist while their pages are shared: such pages are not stored again.
        for move in batch.moves:
            self._end(self._coming[move.group, move.copy.digest])

    def _doubt(self, copy: PageCopy, checksum: int | None) -> None:
        """Drop a copy that did not arrive as stored. After a failed transfer it is evicted, and tiers below keep
        theirs."""
        self.counts.refused += 1
        if checksum is None:
            copy.lose()
            return
        if copy.source is not None:
            self.below.counts[copy.source].refused += 1
        if not copy.gone:
            copy.group.hidden(copy.digest)

    # Numbers.

    def used(self) -> int:
        """Return the number of slots that hold copies, in all groups."""
        return sum(group.size - len(group.free) for group in self.groups)

    def report(self) -> HostCounts:
        sizes, pinned = [group.size for group in self.groups], [group.pinned for group in self.groups]
        return replace(self.counts, slots=sum(sizes), used=self.used(), pinned=sum(pinned))

    def check(self) -> None:
        """Assert the accounting of slots (tests, debugging)."""
        moving = {load.copy for load in self._coming.values()}
        moving.update(self.below.holding())
        self.below.check()
        for group in self.groups:
            held = [copy.slot for copy in group.copies.values() if copy.lease is None]
            held += [copy.slot for copy in moving if copy.group is group and copy.gone and copy.lease is None]
            assert not set(held) & set(group.free), "a slot is free and holds a copy"
            assert len(held) == len(set(held)) and len(group.free) == len(set(group.free)), "a slot is held twice"
