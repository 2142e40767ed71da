"""The tiers below the host tier, as the loop sees them: open questions, slots in jobs, answers.

The loop sends orders and reads answers without waiting. A complete copy is written through to every tier below, so that
its slot can be reused at once, and a new process finds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gapless.base.records import NO_TRANSFER, KVTransfer
from gapless.offload.copies import GroupCopies, Lease, PageCopy
from gapless.offload.search import Search
from gapless.offload.tiers.peer import PeerWorker
from gapless.offload.tiers.seam import JobEnd, TierAnswer, TierPage, TierRelease, key_of
from gapless.offload.tiers.worker import TierWorker
from gapless.pace.load_gate import PAGE_WEIGHT, LoadGate
from gapless.pace.mean import Mean

LOOKUP_NS = 50_000_000
"""[ns] Time limit for a tier's answer; a page without an answer counts as missing."""
CLAIM_NS = 10_000_000_000
"""Time limit for a peer to compute claimed pages, and again to load them."""
JOB_PAGES, JOB_BYTES, JOB_NS = 32, 8 << 20, 8_000_000
"""[pages, bytes, ns] Bounds of a job: 8 MiB, or the tier's 8 ms if that is more, and at most 32 pages: a tier answers
no question during a job."""
LEASE_NS = 5_000_000_000
"""Unread borrowed pages are returned after this time: half of the longest lease that a peer gives."""
MOST_WAITING = 8192
"""[pages] Most copies waiting for their store to one tier; they hold no slot."""
BRAKE_SECONDS = 4.0
"""[s] Longest queue of stores, by time; further copies are dropped."""


@dataclass
class LowerCounts:
    """Pages of one tier: its room and queues now, and counts since the start."""

    used_bytes: int = 0
    """Bytes of its pages; 0 if unknown"""
    size_bytes: int = 0
    loading: int = 0
    """Pages under loads for requests"""
    quarantined: int = 0
    """Pages of abandoned loads: their slots are not reused until the tier has ended the load"""
    storing: int = 0
    waiting: int = 0
    """Pages waiting for their store"""
    hits: int = 0
    """Found for requests"""
    missed: int = 0
    """Missing for requests"""
    stored: int = 0
    loaded: int = 0
    """Loaded into slots of the host tier, or lent"""
    lent: int = 0
    """Lent by a peer, and read in its memory; also counted as loaded"""
    failed: int = 0
    """Loads with a page that the tier could not read"""
    cancelled: int = 0
    """Late loads that ended before their last page: nothing failed"""
    refused: int = 0
    """Loaded, with a checksum other than the stored one"""
    late: int = 0
    """Requests that stopped waiting for an answer or a load"""
    dropped_busy: int = 0
    """Pages not stored: too many waited"""
    dropped_slow: int = 0
    """Pages not stored: the queue would have taken too long"""
    dropped_gone: int = 0
    """Pages not stored: the host tier had reused the copy's slot"""
    dropped_failed: int = 0
    """Pages not stored: the tier failed"""
    read_bytes: int = 0
    written_bytes: int = 0
    read_ns: int = 0
    """Time of load jobs"""
    written_ns: int = 0


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
        """`lines` take the orders and return the results of one tier each, without waiting. `slot` returns the memory
        of a group's slot. A load is late after `late_ns`, an answer after `lookup_ns`. `gate` takes in the times of
        loads."""
        self.lines: Sequence[TierWorker] = lines
        self.counts = [LowerCounts() for _ in lines]
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
        self._fresh: list[deque[PageCopy | str]] = [deque() for _ in lines]
        """Copies to store, and names of requests whose end follows all stores before"""
        self._peers = {place: line for place, line in enumerate(lines) if isinstance(line, PeerWorker)}
        self._giving = [place for place, line in self._peers.items() if line.gives]
        self._storing = [0 for _ in lines]
        """Copies under stores to each tier"""
        self._page_seconds = [Mean(PAGE_WEIGHT) for _ in lines]
        """Time to store a page"""
        self._latest_ns = [[0.0, 0.0] for _ in lines]
        """Time of a page in the latest store and the latest load that moved any"""

    # For requests.

    def ask(self, pages: Sequence[tuple[GroupCopies, bytes]], transfer: KVTransfer = NO_TRANSFER) -> Search:
        """Ask every tier for the pages of these groups and digests."""
        search = Search(bool(transfer.claim and self._peers))
        patience = CLAIM_NS if search.claims else self._lookup_ns
        search.late_at = self._clock() + patience
        keys = [key_of(group.number, digest) for group, digest in pages]
        for place, line in enumerate(self.lines):
            number = self._wait(search, place)
            self._asked[number] = pages
            line.ask(number, keys, (patience if place in self._peers else self._lookup_ns) / 1e9, transfer)
        return search

    def waits(self, search: Search) -> bool:
        """Return whether a request should still wait."""
        if search.open and self._clock() >= search.late_at:
            for place in set(search.open.values()):
                self.counts[place].late += 1
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
                if search.borrows and place in self._peers:
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
        mean_ns = self._gate.page_ns(place) if loads else 1e9 * self._page_seconds[place].value
        latest_ns, least = self._latest_ns[place][loads], JOB_BYTES // self._page_bytes
        fast = int(JOB_NS / max(latest_ns, mean_ns)) if latest_ns else 0
        return max(1, min(JOB_PAGES, max(least, fast)))

    def _patience(self, search: Search) -> int:
        return max(CLAIM_NS, self._late_ns) if search.claims else self._late_ns

    def load(self, search: Search, place: int, copies: list[PageCopy]) -> None:
        """Order a tier to fill these copies; the search waits for it."""
        number = self._begin_load(search, place, copies)
        self.lines[place].load(number, self._pages(copies), self._patience(search) / 1e9)

    def borrow(self, search: Search, place: int, pages: Sequence[tuple[GroupCopies, bytes]]) -> None:
        """Ask a peer to lend these pages; the search waits for it."""

        def give_back() -> None:
            del self.leases[number]
            line.give_back(number)

        line, lease = self._peers[place], Lease(give_back, self._clock() + LEASE_NS)
        number = self._begin_load(search, place, [group.borrow(digest, lease) for group, digest in pages])
        self.leases[number] = lease
        search.hold(lease)
        line.borrow(number, [copy.key for copy in lease.copies], self._patience(search) / 1e9)

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
        return pages * min([self._gate.page_ns(place) for place in range(len(self.lines))], default=0.0)

    # For the host tier.

    def offer(self, copy: PageCopy) -> None:
        """Offer a complete copy to every tier that keeps up."""
        for place in range(len(self.lines)):
            if place not in self._peers or place in self._giving:
                self._offer(place, copy)

    def _offer(self, place: int, copy: PageCopy) -> None:
        fresh, counts = self._fresh[place], self.counts[place]
        if len(fresh) >= MOST_WAITING:
            counts.dropped_busy += 1
        elif len(fresh) * self._page_seconds[place].value > BRAKE_SECONDS:
            counts.dropped_slow += 1
        else:
            fresh.append(copy)

    def begin(self, name: str) -> None:
        """Announce a request whose pages peers may take."""
        for place in self._giving:
            self._peers[place].begin(name)

    def give(self, copy: PageCopy) -> None:
        """Offer this copy, perhaps an old one, to peers."""
        for place in self._giving:
            self._offer(place, copy)

    def end(self, name: str, whole: bool) -> None:
        """End the offers of a request; if `whole`, peers wait for the ones made."""
        for place in self._giving:
            if whole:
                self._fresh[place].append(name)
                self._send(place)
            else:
                self._peers[place].end(name, False)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark pages as used: the host tier serves them itself."""
        for line in self.lines:
            line.touch(keys)

    def drop(self, key: bytes) -> None:
        """Drop a page with doubtful contents from every tier, running jobs included."""
        for line in self.lines:
            line.drop([key])
        for job in self.jobs.values():
            job.doubted.add(key)

    # For the loop.

    @property
    def gives(self) -> bool:
        """Return whether peers may take pages here, and so wait for stores."""
        return bool(self._giving)

    @property
    def has_news(self) -> bool:
        return any([line.has_news for line in self.lines])

    def poll(self) -> bool:
        """Take in news, and send the next stores. Returns whether there were news."""
        came = False
        for lease in [lease for lease in self.leases.values() if self._clock() > lease.late_at]:
            lease.end()
        for place, line in enumerate(self.lines):
            for news in line.take():
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
        fresh = self._fresh[place]
        while fresh:
            if isinstance(first := fresh[0], str):
                self._peers[place].end(first, True)
                fresh.popleft()
            elif all_of_it or self._storing[place] < most_stored(first.group):
                self.store(place)
            else:
                break

    def report(self) -> tuple[LowerCounts, ...]:
        """Return the counts of each tier, with its present loads and stores."""
        loading, quarantined = [0 for _ in self.lines], [0 for _ in self.lines]
        for number, job in self.jobs.items():
            if job.loads:
                waits = any([number in search.open for search in self._waiting[number]])
                (loading if waits else quarantined)[job.place] += len(job.copies)
        found = []
        for place, line in enumerate(self.lines):
            used, size = line.room()
            found.append(replace(
                self.counts[place], used_bytes=used, size_bytes=size, loading=loading[place],
                quarantined=quarantined[place], storing=self._storing[place], waiting=len(self._fresh[place]),
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
        for place in range(len(self.lines)):
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
            whole = search.claims and search.borrows and place in self._peers and all(answer.hits)
            if answer.open or whole:  # otherwise the planner chooses
                self._fetch_early(search, new)
                search.again = whole and not answer.open and not any([one.pool.rule.window for one, _ in pages])
            if not answer.open:
                del search.open[answer.number]
                self.counts[place].hits += len(hits)
                self.counts[place].missed += len(pages) - len(hits)
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
            self._latest_ns[place][job.loads] = 1e9 * end.seconds * self._page_bytes / end.nbytes
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
        counts, good = self.counts[place], len(end.checksums)
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
            self.lines[place].drop([job.copies[good].key])  # else the next request would find it, and fail again
        else:
            counts.cancelled += good < len(job.copies)

    def store(self, place: int) -> None:
        """Begin the next store, of copies not yet evicted."""
        fresh, copies = self._fresh[place], list[PageCopy]()
        while fresh and not isinstance(copy := fresh[0], str):
            if len(copies) >= min(self._job_pages(place, False), most_stored(copy.group)):
                break
            fresh.popleft()
            if copy.gone:
                self.counts[place].dropped_gone += 1
            else:
                copy.pin()
                copies.append(copy)
        if copies:
            self._number += 1
            self._storing[place] += len(copies)
            if place in self._giving:
                self.given[self._number] = dict(enumerate(copies))
                for copy in copies:
                    copy.pin()
            self.jobs[self._number] = LowerJob(place, copies, False, set())
            self.lines[place].store(self._number, self._pages(copies))

    def stored(self, place: int, job: LowerJob, end: JobEnd) -> None:
        """Count the stored pages, and have the tier drop the ones doubted meanwhile."""
        counts, line = self.counts[place], self.lines[place]
        self._storing[place] -= len(job.copies)
        counts.stored += len(end.checksums)
        counts.dropped_failed += len(job.copies) - len(end.checksums)
        counts.written_bytes += end.nbytes
        counts.written_ns += round(1e9 * end.seconds)
        self._page_seconds[place].add(end.seconds / len(job.copies))
        if job.doubted and (bad := [copy.key for copy in job.copies if copy.key in job.doubted]):
            line.drop(bad)


def most_stored(group: GroupCopies) -> int:
    """Return the most copies held by stores to a tier: enough for a pause of the loop, and few of all."""
    return max(2, group.size // 4)
