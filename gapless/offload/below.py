"""The tiers below the host tier, as the loop sees them: open questions, slots in jobs, answers.

The loop sends orders and reads answers without waiting. A complete copy is written through to every tier below, so that
its slot can be reused at once, and a new process finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gapless.base.records import NO_TRANSFER, KVTransfer
from gapless.offload.copies import GroupCopies, Lease, PageCopy
from gapless.offload.lower import JOB_PAGES, LowerCounts, LowerTier, most_stored
from gapless.offload.search import Search
from gapless.offload.tiers.seam import JobEnd, PeerExchange, TierAnswer, TierPage, TierRelease, key_of
from gapless.offload.tiers.worker import TierWorker
from gapless.pace.load_gate import LoadGate

LOOKUP_NS = 50_000_000
"""[ns] Time limit for a tier's answer; a page without an answer counts as missing."""
CLAIM_NS = 10_000_000_000
"""Time limit for a peer to compute claimed pages, and again to load them."""
LEASE_NS = 5_000_000_000
"""Unread borrowed pages are returned after this time: half of the longest lease that a peer gives."""


class LowerJob(NamedTuple):
    """Copies of one job; their slots stay until it ends."""

    place: int
    """The tier"""
    copies: list[PageCopy]
    loads: bool
    doubted: set[bytes]
    """Keys doubted since it was sent"""


class LowerTiers:
    """The tiers in order: the first one with a page loads it, and all of them store it."""

    def __init__(
        self, lines: Sequence[TierWorker], slot: Callable[[int, int], memoryview], clock: Callable[[], int],
        late_ns: int, lookup_ns: int, gate: LoadGate,
    ) -> None:  # fmt: skip
        """`slot` returns the memory of a group's slot. A load is late after `late_ns`, an answer after `lookup_ns`.
        `gate` takes in the times of loads."""
        self.tiers = [LowerTier(line) for line in lines]
        self._slot, self._clock, self._gate = slot, clock, gate
        self._late_ns, self._lookup_ns = late_ns, lookup_ns
        self._page_bytes = len(slot(0, 0))
        self._number = 0
        self._waiting: dict[int, list[Search]] = {}
        """Searches that wait for a question or a load, by its number"""
        self._asked: dict[int, Sequence[tuple[GroupCopies, bytes]]] = {}
        self.jobs: dict[int, LowerJob] = {}
        self.given: dict[int, dict[int, PageCopy]] = {}
        """Copies kept in place for peers, by the number of their store and their place in it"""
        self.leases: dict[int, Lease] = {}
        """Leases from peers, by the number of the job"""
        self._coming: dict[bytes, int] = {}
        """Number of the running load of each key"""

    @property
    def counts(self) -> list[LowerCounts]:
        """Return the counts of each tier."""
        return [tier.counts for tier in self.tiers]

    # For requests.

    def ask(self, pages: Sequence[tuple[GroupCopies, bytes]], transfer: KVTransfer = NO_TRANSFER) -> Search:
        """Ask every tier for the pages of these groups and digests."""
        search = Search(bool(transfer.claim and any([tier.exchange for tier in self.tiers])))
        patience = CLAIM_NS if search.claims else self._lookup_ns
        search.late_at = self._clock() + patience
        keys = [key_of(group.number, digest) for group, digest in pages]
        for place, tier in enumerate(self.tiers):
            number = self._wait(search, place)
            self._asked[number] = pages
            tier.line.ask(number, keys, (patience if tier.exchange else self._lookup_ns) / 1e9, transfer)
        return search

    def waits(self, search: Search) -> bool:
        """Return whether a request should still wait."""
        if search.open and self._clock() >= search.late_at:
            for place in set(search.open.values()):
                self.tiers[place].counts.late += 1
            search.open = {}
            search.failed()
        return bool(search.open)

    def fetch(self, search: Search, missing: Sequence[tuple[GroupCopies, bytes]]) -> None:
        """Load the pages that the host tier lacks. The search then finds nothing more: missing pages are computed.
        Borrowed pages are found once again: no copy is left if the device evicts them before the request begins."""
        self.load_lacking(search, missing)
        if search.again or not search.borrows:
            search.found = {}
        search.again = True

    def load_lacking(self, search: Search, missing: Sequence[tuple[GroupCopies, bytes]]) -> None:
        """Load or borrow the pages that the host tier lacks, in order, as far as it has slots."""
        had = [copy for group, digest in missing if (copy := group.find(digest)) is not None]
        for copy in had:
            copy.pin()  # new copies must not take its slot
        wanted: dict[int, list[tuple[GroupCopies, bytes]]] = {}
        taken: dict[int, list[PageCopy]] = {}
        for group, digest in missing:
            key = key_of(group.number, digest)
            if (job := self._coming.get(key)) is not None:
                search.open[job] = self.jobs[job].place
                self._waiting[job].append(search)
                if (lease := self.leases.get(job)) is not None:
                    search.hold(lease)
            elif digest not in group.copies and (place := search.found.get(key)) is not None:
                if search.borrows and self.tiers[place].exchange:
                    wanted.setdefault(place, []).append((group, digest))
                elif (new := group.take(digest)) is None:
                    break
                else:
                    taken.setdefault(place, []).append(new)
        for place, copies in taken.items():
            most = self._job_pages(place, True)
            for first in range(0, len(copies), most):
                self.load(search, place, copies[first : first + most])
        for place, pages in wanted.items():
            for first in range(0, len(pages), JOB_PAGES):
                self.borrow(search, place, pages[first : first + JOB_PAGES])
        for copy in had:
            copy.unpin()
        search.fetched = True
        search.late_at = self._clock() + self._patience(search)

    def _job_pages(self, place: int, loads: bool) -> int:
        """Return the most pages of a tier's next job."""
        tier = self.tiers[place]
        mean_ns = self._gate.page_ns(place) if loads else 1e9 * tier.page_seconds.value
        return tier.job_pages(loads, mean_ns, self._page_bytes)

    def _patience(self, search: Search) -> int:
        return max(CLAIM_NS, self._late_ns) if search.claims else self._late_ns

    def load(self, search: Search, place: int, copies: list[PageCopy]) -> None:
        """Order a tier to fill these copies; the search waits for it."""
        number = self._begin_load(search, place, copies)
        self.tiers[place].line.load(number, self._pages(copies), self._patience(search) / 1e9)

    def borrow(self, search: Search, place: int, pages: Sequence[tuple[GroupCopies, bytes]]) -> None:
        """Ask a peer to lend these pages; the search waits for it."""
        exchange = self.tiers[place].exchange
        assert exchange is not None

        def give_back(peer: PeerExchange = exchange) -> None:
            del self.leases[number]
            peer.give_back(number)

        lease = Lease(give_back, self._clock() + LEASE_NS)
        number = self._begin_load(search, place, [group.borrow(digest, lease) for group, digest in pages])
        self.leases[number] = lease
        search.hold(lease)
        exchange.borrow(number, [copy.key for copy in lease.copies], self._patience(search) / 1e9)

    def _begin_load(self, search: Search, place: int, copies: list[PageCopy]) -> int:
        number = self._wait(search, place)
        self.jobs[number] = LowerJob(place, copies, True, set())
        for copy in copies:
            copy.source = place
            self._coming[copy.key] = number
        return number

    def _wait(self, search: Search, place: int) -> int:
        self._number += 1
        search.open[self._number] = place
        self._waiting[self._number] = [search]
        return self._number

    def _pages(self, copies: Sequence[PageCopy]) -> list[TierPage]:
        return [TierPage(copy.key, self._slot(copy.group.number, copy.slot), copy.checksum or 0) for copy in copies]

    def patience(self) -> float | None:
        """Return the seconds until the next request stops waiting; None if none waits."""
        now = self._clock()
        times = [search.late_at for searches in self._waiting.values() for search in searches if search.open]
        return max(0, min(times) - now) / 1e9 if times else None

    def least_ns(self, pages: int) -> float:
        """Return the fastest tier's time to load this many pages."""
        return pages * min([self._gate.page_ns(place) for place in range(len(self.tiers))], default=0.0)

    # For the host tier.

    def offer(self, copy: PageCopy) -> None:
        """Offer a complete copy to every tier that keeps up."""
        for tier in self.tiers:
            if tier.exchange is None or tier.gives:
                tier.offer(copy)

    def begin(self, name: str) -> None:
        """Announce a request whose pages peers may take."""
        for exchange in self._giving().values():
            exchange.begin(name)

    def give(self, copy: PageCopy) -> None:
        """Offer this copy, perhaps an old one, to peers."""
        for place in self._giving():
            self.tiers[place].offer(copy)

    def end(self, name: str, whole: bool) -> None:
        """End the offers of a request; if `whole`, peers wait for the ones made."""
        for place, exchange in self._giving().items():
            if whole:
                self.tiers[place].fresh.append(name)
                self._send(place)
            else:
                exchange.end(name, False)

    def _giving(self) -> dict[int, PeerExchange]:
        """Return the ways to peers that may take pages here, by tier."""
        return {place: tier.exchange for place, tier in enumerate(self.tiers) if tier.exchange and tier.gives}

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark pages as used: the host tier serves them itself."""
        for tier in self.tiers:
            tier.line.touch(keys)

    def drop(self, key: bytes) -> None:
        """Drop a page with doubtful contents from every tier, running jobs included."""
        for tier in self.tiers:
            tier.line.drop([key])
        for job in self.jobs.values():
            job.doubted.add(key)

    # For the loop.

    @property
    def gives(self) -> bool:
        """Return whether peers may take pages here, and so wait for stores."""
        return any([tier.gives for tier in self.tiers])

    @property
    def has_news(self) -> bool:
        return any([tier.line.has_news for tier in self.tiers])

    def poll(self) -> bool:
        """Take in news, and send the next stores. Returns whether there were news."""
        came = False
        for lease in [lease for lease in self.leases.values() if self._clock() > lease.late_at]:
            lease.end()
        for place, tier in enumerate(self.tiers):
            for news in tier.line.take():
                came = True
                if isinstance(news, TierAnswer):
                    self._answered(place, news)
                elif isinstance(news, TierRelease):
                    self.released(news)
                else:
                    self.ended(place, news)
            self._send(place)
        return came

    def _send(self, place: int, all_of_it: bool = False) -> None:
        """Send the next stores, within the slots that stores may hold, or all."""
        tier = self.tiers[place]
        fresh = tier.fresh
        while fresh:
            if isinstance(first := fresh[0], str):
                assert tier.exchange is not None
                tier.exchange.end(first, True)
                fresh.popleft()
            elif all_of_it or tier.storing < most_stored(first.group):
                self.store(place)
            else:
                break

    def report(self) -> tuple[LowerCounts, ...]:
        """Return the counts of each tier, with its present loads and stores."""
        loading, quarantined = [0 for _ in self.tiers], [0 for _ in self.tiers]
        for number, job in self.jobs.items():
            if job.loads:
                waits = any([number in search.open for search in self._waiting[number]])
                (loading if waits else quarantined)[job.place] += len(job.copies)
        found = []
        for place, tier in enumerate(self.tiers):
            used, size = tier.line.room()
            found.append(replace(
                tier.counts, used_bytes=used, size_bytes=size, loading=loading[place],
                quarantined=quarantined[place], storing=tier.storing, waiting=len(tier.fresh),
            ))  # fmt: skip
        return tuple(found)

    def holding(self) -> set[PageCopy]:
        """Return the copies held by jobs and peers."""
        held = [job.copies for job in self.jobs.values()]
        return set().union(*held, *[given.values() for given in self.given.values()])

    def check(self) -> None:
        """Assert the accounting of leases (tests, debugging)."""
        for number, lease in self.leases.items():
            there = [copy for copy in lease.copies if copy.pins or not copy.gone]
            assert 0 < lease.left == len(there), (
                f"job {number} has {lease.left} pages to give back, and uses {len(there)}"
            )

    def flush(self) -> None:
        """Send all waiting stores: the loop has ended, and takes no slot any more."""
        for place in range(len(self.tiers)):
            self._send(place, all_of_it=True)

    def _answered(self, place: int, answer: TierAnswer) -> None:
        pages = self._asked[answer.number]
        hits = [page for page, hit in zip(pages, answer.hits, strict=True) if hit]
        for search in self._waiting[answer.number]:
            if answer.number not in search.open:  # too late
                continue
            search.lends |= answer.lends
            new = [page for page in hits if key_of(page[0].number, page[1]) not in search.found]
            for group, digest in hits:
                key = key_of(group.number, digest)
                search.found[key] = min(place, search.found.get(key, place))
            whole = search.claims and search.borrows and bool(self.tiers[place].exchange) and all(answer.hits)
            if answer.open or whole:  # otherwise the planner chooses
                self._fetch_early(search, new)
                search.again = whole and not answer.open and not any([one.pool.rule.window for one, _ in pages])
            if not answer.open:
                del search.open[answer.number]
                self.tiers[place].counts.hits += len(hits)
                self.tiers[place].counts.missed += len(pages) - len(hits)
        if not answer.open:
            del self._asked[answer.number], self._waiting[answer.number]

    def _fetch_early(self, search: Search, hits: Sequence[tuple[GroupCopies, bytes]]) -> None:
        """Load the pages that a peer has so far, without waiting for the planner. Pages not borrowed get at most half
        of the slots: they wait for the others, and must not evict each other. Few pages of a window are read: the
        planner chooses."""
        pages = [(group, digest) for group, digest in hits if not group.pool.rule.window]
        if search.borrows and pages:
            self.load_lacking(search, pages)
            return
        waiting = {one for searches in self._waiting.values() for one in searches}
        room = pages[0][0].size // 2 - sum([one.early for one in waiting]) if pages else 0
        if room > 0:
            search.early += len(pages[:room])
            self.load_lacking(search, pages[:room])

    def ended(self, place: int, end: JobEnd) -> None:
        """Take in an ended job of a tier, and release its slots."""
        job, lease = self.jobs.pop(end.job), self.leases.get(end.job)
        if lease is not None:
            lease.memory = end.memory
            for copy, slot in zip(job.copies, end.places, strict=False):
                copy.slot = slot
        elif end.nbytes:
            self.tiers[place].latest_ns[job.loads] = 1e9 * end.seconds * self._page_bytes / end.nbytes
        if job.loads:
            self.loaded(place, job, end)
        else:
            self.stored(place, job, end)
        for copy in job.copies:
            copy.unpin()
        waiting = [one for one in self._waiting.pop(end.job, ()) if one.open.pop(end.job, None) is not None]
        for search in waiting if job.loads else ():
            search.came += [copy for copy in job.copies if not copy.gone]
            if end.failed:
                search.failed()
        if lease is not None and not lease.holders:
            lease.end()

    def released(self, news: TierRelease) -> None:
        """Release a copy kept for peers."""
        given = self.given[news.job]
        given.pop(news.place).unpin()
        if not given:
            del self.given[news.job]

    def loaded(self, place: int, job: LowerJob, end: JobEnd) -> None:
        """Take in loaded pages as copies, unless doubted meanwhile; the rest is no longer found."""
        tier, good = self.tiers[place], len(end.checksums)
        counts = tier.counts
        for checksum, copy in zip(end.checksums, job.copies, strict=False):
            if not copy.gone:
                copy.checksum = checksum
        for copy in job.copies[good:]:
            copy.lose()
        for copy in job.copies:
            del self._coming[copy.key]
        counts.loaded += good
        counts.lent += good if end.memory is not None else 0
        if good:
            self._gate.moved(place, good, 1e9 * end.seconds)
        counts.read_bytes += end.nbytes
        counts.read_ns += round(1e9 * end.seconds)
        if end.failed:
            counts.failed += 1
            tier.line.drop([job.copies[good].key])  # else the next request would find it, and fail again
        else:
            counts.cancelled += good < len(job.copies)

    def store(self, place: int) -> None:
        """Begin the next store, of copies not yet evicted."""
        tier, copies = self.tiers[place], list[PageCopy]()
        fresh = tier.fresh
        while fresh and not isinstance(copy := fresh[0], str):
            if len(copies) >= min(self._job_pages(place, False), most_stored(copy.group)):
                break
            fresh.popleft()
            if copy.gone:
                tier.counts.dropped_gone += 1
            else:
                copy.pin()
                copies.append(copy)
        if copies:
            self._number += 1
            tier.storing += len(copies)
            if tier.gives:
                self.given[self._number] = dict(enumerate(copies))
                for copy in copies:
                    copy.pin()
            self.jobs[self._number] = LowerJob(place, copies, False, set())
            tier.line.store(self._number, self._pages(copies))

    def stored(self, place: int, job: LowerJob, end: JobEnd) -> None:
        """Count the stored pages, and have the tier drop the ones doubted meanwhile."""
        tier = self.tiers[place]
        counts = tier.counts
        tier.storing -= len(job.copies)
        counts.stored += len(end.checksums)
        counts.dropped_failed += len(job.copies) - len(end.checksums)
        counts.written_bytes += end.nbytes
        counts.written_ns += round(1e9 * end.seconds)
        tier.page_seconds.add(end.seconds / len(job.copies))
        if job.doubted and (bad := [copy.key for copy in job.copies if copy.key in job.doubted]):
            tier.line.drop(bad)
