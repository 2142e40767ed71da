"""The peer tier: pages that other engines have computed, fetched by their keys, and pages of ours for them.

Prefill and decode apart is no more than this: the prefiller gives the pages of a prompt, and the decoder, before it
begins the same prompt, looks for them as it looks in any tier. A page that does not come is computed.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import takewhile

from gapless.base.peers import PeerPlan
from gapless.base.records import NO_TRANSFER, KVTransfer
from gapless.offload.tiers.copying import CopyThreads
from gapless.offload.tiers.frames import tls_of
from gapless.offload.tiers.giving import PeerServer
from gapless.offload.tiers.link import FIRST_BACK_OFF, Adopt, LinkQuestion, PeerCaller, PeerLink
from gapless.offload.tiers.seam import Found, JobEnd, PeerExchange, TierPage, TierRelease, TierSetup
from gapless.offload.tiers.shelf import Shelf, ShelfPage
from gapless.offload.tiers.worker import TierQuestion, TierWorker

SHELF_BYTES = 2**30
"""Bytes kept for peers by default"""
LOOKUP_SECONDS = 1.0
"""How long a question may stay open when its asker sets no time"""
MAX_PLACES = 65_536
"""Number of keys remembered with their peer"""


class PeerTier:
    """A tier that gives pages to peers if it listens, and takes pages from its peers."""

    def __init__(
        self, shelf: Shelf, links: Sequence[PeerLink], copies: CopyThreads, server: PeerServer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.shelf, self.server = shelf, server
        self.released: Callable[[int, int], None] = lambda job, place: None
        """Called, from any thread, when a page is not kept any more: the job that stored it, and its place there"""
        self.links = {str(link.address): link for link in links}
        self._ended: deque[JobEnd] = deque()
        self._copies, self._clock = copies, clock
        self._asked: dict[Hashable, list[LinkQuestion]] = {}
        self._has: OrderedDict[bytes, PeerLink] = OrderedDict()
        """The peer that has a page, by its own answer"""

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        return self.lookup_for(tuple(keys), keys, NO_TRANSFER, self._clock() + LOOKUP_SECONDS)

    def lookup_for(
        self, number: Hashable, keys: Sequence[bytes], transfer: KVTransfer, until: float
    ) -> list[Found]:  # fmt: skip
        """Return the answer so far to the question of this number, which is asked at its first call.

        A request that names a peer is answered by it, and waits for pages still to be computed; another by the peer
        that has most of it. One that has not answered `until` then has nothing.
        """
        if number not in self._asked:
            now = self._clock()
            self._asked = {one: asked for one, asked in self._asked.items() if asked[0].until > now}
            links = [link for name, link in self.links.items() if transfer.peer in ("", name)]
            if not links:
                return [Found.MISS] * len(keys)
            self._asked[number] = [link.ask(transfer.claim, keys, until) for link in links]
        asked = self._asked[number]
        if len(asked) > 1 and any([question.open for question in asked]) and self._clock() < asked[0].until:
            return [Found.PENDING] * len(keys)
        best = max(asked, key=lambda question: question.found.count(Found.HIT))
        found = best.found
        for key, one in zip(keys, found, strict=True):
            if one is Found.HIT:
                self._has[key] = best.link
        while len(self._has) > MAX_PLACES:
            self._has.popitem(last=False)
        if Found.PENDING not in found:
            del self._asked[number]
        return found

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        shelved = [
            ShelfPage(page.key, page.slot, page.checksum, partial(self.released, job, place))
            for place, page in enumerate(pages)
        ]
        kept = self.shelf.put(shelved)
        done = [page.checksum for page, _ in takewhile(lambda one: one[1], zip(pages, kept, strict=True))]
        nbytes = sum(len(page.slot) for page in pages[: len(done)])
        self._ended.append(JobEnd(job, tuple(done), len(done) < len(pages), nbytes))

    def load(self, job: int, pages: Sequence[TierPage], borrows: bool = False) -> None:
        link = self._has.get(pages[0].key) or (next(iter(self.links.values())) if len(self.links) == 1 else None)
        if link is None:
            self._ended.append(JobEnd(job, (), failed=True))
        else:
            link.load(job, pages, borrows)

    def lends(self, keys: Sequence[bytes]) -> bool:
        """Return whether these pages, which one peer has, can be borrowed."""
        return bool(keys) and (link := self._has.get(keys[0])) is not None and link.lends

    def give_back(self, job: int) -> None:
        """Nothing reads the pages any more that this job has borrowed."""
        for link in self.links.values():
            link.give_back(job)

    def poll(self) -> list[JobEnd]:
        every = [self._ended, *[link.ended for link in self.links.values()]]
        return [ended.popleft() for ended in every for _ in range(len(ended))]

    def touch(self, keys: Sequence[bytes]) -> None:
        self.shelf.find("", keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        self.shelf.drop(keys)
        for key in keys:
            self._has.pop(key, None)

    def cancel(self, job: int) -> None:
        for link in self.links.values():
            link.cancel(job)

    def close(self) -> None:
        for link in self.links.values():  # all at once: each may wait for a lost host
            link.stop()
        for link in self.links.values():
            link.close()
        if self.server is not None:
            self.server.close()
        if self.shelf.memory is not None:
            self.shelf.memory.close()
        self._copies.close()


def open_peer_tier(
    setup: TierSetup, plan: PeerPlan, adopt: Adopt = lambda data: None, back_off: float = FIRST_BACK_OFF
) -> PeerTier:
    """Listen, and begin to connect. Raises ConfigError."""
    gives, takes = tls_of(plan.tls, gives=True), tls_of(plan.tls, gives=False)
    shelf = Shelf((setup.nbytes or SHELF_BYTES) if plan.listen else 0, setup.slot_bytes, setup.shared)
    server = PeerServer(plan.listen, plan.key, setup.namespace, shelf, gives) if plan.listen else None
    copies = CopyThreads()
    callers = [PeerCaller(peer, plan.key, setup.namespace, takes) for peer in plan.peers]
    links = [PeerLink(caller, copies, setup.slot_bytes, adopt, back_off).start() for caller in callers]
    return PeerTier(shelf, links, copies, server)


class PeerWorker(TierWorker):
    """The thread of a peer tier, which also receives the names of requests."""

    def __init__(
        self, name: str, tier: PeerTier, ring: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        self._peer = tier
        super().__init__(name, tier, ring, clock)
        self._poll_seconds = LOOKUP_SECONDS  # the links wake the thread, so it need not poll often
        for link in tier.links.values():
            link.news = self._wake.set
        # The loop is not woken: nothing waits for these slots, and a wake-up for each page would keep it from its work.
        tier.released = lambda job, place: self._news.append(TierRelease(job, place))
        self.gives = tier.server is not None
        """Whether peers may take pages here"""

    @property
    def exchange(self) -> PeerExchange:
        return self

    def begin(self, name: str) -> None:
        """A request of this name was submitted: its pages will follow."""
        self._send(self._quick, lambda: self._peer.shelf.begin(name))

    def end(self, name: str, whole: bool) -> None:
        """No page of the request will be stored any more; where it is whole, after the stores that wait now."""
        self._send(self._stores if whole else self._quick, lambda: self._peer.shelf.end(name))

    def borrow(self, job: int, keys: Sequence[bytes], seconds: float) -> None:
        """Have the peer lend these pages; they are its own until `give_back`, and their checksums decide what they
        hold. What it has not lent within `seconds` is cancelled."""
        pages = [TierPage(key) for key in keys]
        self._load(job, len(pages), seconds, lambda: self._peer.load(job, pages, borrows=True))

    def give_back(self, job: int) -> None:
        """Nothing reads the pages any more that this job has borrowed."""
        self._send(self._quick, lambda: self._peer.give_back(job))

    def room(self) -> tuple[int, int]:
        """Return the bytes that are kept for peers now, and that may be."""
        return self._peer.shelf.used, self._peer.shelf.nbytes if self.gives else 0

    def _look(self, question: TierQuestion, places: Sequence[int]) -> list[Found]:
        found = self._peer.lookup_for(question.number, question.keys, question.transfer, question.late_at)
        return [found[place] for place in places]

    def _lends(self, keys: Sequence[bytes]) -> bool:
        return self._peer.lends(keys)
