"""Rows that wait for pages of the tiers: when a load begins, and how long a row waits for it. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.memory.index import Match, PrefixIndex
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.source import Lookup, PageSource
from gapless.offload.host import HostTier
from gapless.offload.search import LoadTicket, Search

LEAST_TOKENS = 256
"""[tokens] Least tokens of a load: fewer are recomputed in less time than it takes to notice the end of a load."""
MOST_LOADS = 2
"""[loads] How often a row waits for pages of the host tier before it computes pages that others evicted."""


@dataclass(slots=True, eq=False)
class TierWait:
    """The wait of one row, from its first question to the tiers until it runs or ends. `TierSource` alone writes it."""

    ticket: LoadTicket | Search | None = None
    """Running load from the host tier, or search of the tiers below"""
    search: Search | None = None
    """Search of the tiers below, running or ended"""
    begun: int = 0
    """Loads that it has waited for"""
    had: int | None = None
    """Pages it had on the device at its first wait"""
    declined: bool = False
    """Whether a load was weighed and declined"""
    early: int = 0
    """Pages that it needs once it runs, if it has loads before its search ended"""


class TierSource(PageSource):
    """The host tier and the tiers below as the planner's source of pages.

    A load begins only if its row could be admitted now: it needs these pages anyway.
    """

    def __init__(self, host: HostTier, index: PrefixIndex, pools: Sequence[PagePool], least_tokens: int) -> None:
        """A load has at least `least_tokens`."""
        self.host = host
        self._index, self._pools = index, pools
        self._page_size = pools[0].page_size
        self.least_pages = max(1, -(-least_tokens // self._page_size))
        self._waits: dict[int, TierWait] = {}
        """Waits by the rows' keys"""

    @property
    def loading(self) -> bool:
        return self.host.loading

    def runs(self, rows: int) -> None:
        self.host.running = rows

    def offers(self, name: str) -> None:
        self.host.below.begin(name)

    def offered(self, name: str, digests: Sequence[bytes]) -> None:
        self.host.end(name, digests)

    def waits(self, row: Lookup) -> bool:
        wait = self._waits.get(row.key)
        if wait is None or (ticket := wait.ticket) is None:
            return False
        if self.host.waits(ticket):
            if isinstance(ticket, Search):
                self._load_early(row, wait, ticket)
            return True
        if isinstance(ticket, LoadTicket):
            if ticket.given_up:
                wait.begun = MOST_LOADS
        elif ticket.weighed and not (ticket.fetched or ticket.found):
            self.host.gate.begun(*ticket.weighed)  # without a load the next request must not ask again
        wait.ticket = None
        return False

    def loads(self, row: Lookup, match: Match) -> bool:
        wait = self._waits.get(row.key)
        if wait is None:
            if row.most - match.pages < self.least_pages:
                return False
            wait = self._waits[row.key] = TierWait()
        return wait.begun < MOST_LOADS and self._begin(row, wait, match)

    def admitted(self, key: int, matched: int, missed: int) -> int:
        self.host.counts.missed += missed
        wait = self._waits.pop(key, None)
        if wait is None:
            return 0
        if wait.search is not None:
            wait.search.end()
        return 0 if wait.had is None else max(0, matched - wait.had)

    def give_up(self, key: int) -> None:
        wait = self._waits.pop(key, None)
        if wait is None:
            return
        if isinstance(wait.ticket, LoadTicket):
            wait.ticket.given_up = True
        elif wait.ticket is not None:
            wait.ticket.open = {}  # the loop would wake at its deadline, for an ended request
        if wait.search is not None:
            wait.search.end()

    def _load_early(self, row: Lookup, wait: TierWait, search: Search) -> None:
        """Load the pages that a running search has brought, if the row fits."""
        search.fits = self.fits_alone(row, wait)
        if not (search.came and search.fits):
            return
        if wait.had is None:
            wait.had, _ = self._index.match(row.chain, row.tokens, row.most)
        self.host.counts.hit += self.host.load_early(search) // len(self._pools)

    def fits_alone(self, row: Lookup, wait: TierWait) -> bool:
        """Return whether a row fits without shared pages, beside the others with early loads: else loads for one would
        evict another's."""
        others = sum([other.early for other in self._waits.values() if other is not wait])
        fits = row.short(0) + others <= 0
        if fits:
            wait.early = row.pages
        return fits

    def _begin(self, row: Lookup, wait: TierWait, match: Match) -> bool:
        host, search, matched = self.host, wait.search, match.pages
        least = 1 if search is not None and search.fetched else self.least_pages  # fetched pages are always loaded
        if row.most - matched < least:
            return False
        if host.below.tiers and search is None and self._asks_below(row, wait):
            return True
        search = wait.search
        found = search.found if search is not None else {}

        def has(pool: PagePool, digest: bytes) -> bool:
            return host.has(pool, digest) or host.key(pool, digest) in found

        if not any([has(pool, digest) for pool, digests in match.gaps.items() for digest in digests]):
            return False  # while these are missing, no match is longer
        count, _ = self._index.match(row.chain, row.tokens, row.most, has)
        if count - matched < least or row.short(matched) > 0:
            return False
        missing, tokens = self._index.missing(row.chain, count), (count - matched) * self._page_size
        if not (row.transfer.claim or (search is not None and search.fetched)):
            lacks = [host.key(pool, digest) for pool, digest in missing if not host.has(pool, digest)]
            below_ns = sum([host.gate.page_ns(found[key]) for key in lacks if key in found])
            if not host.gate.pays(tokens, len(missing), below_ns):
                self._decline(wait, tokens)
                if search is not None and found:
                    search.found = {}  # the host's pages may pay by themselves
                    return self._begin(row, wait, match)
                wait.begun = MOST_LOADS
                return False
            host.gate.begun(tokens, len(missing), below_ns)
        if search is not None:
            search.fits = self.fits_alone(row, wait)
            if host.fetch(search, missing):
                if not search.open:  # transfers hold every slot: only the host's pages are left
                    return self._begin(row, wait, match)
                wait.ticket = search
                return True
        self._load(row, wait, matched, missing)
        host.counts.hit += count - matched
        return True

    def _load(self, row: Lookup, wait: TierWait, matched: int, missing: Sequence[tuple[PagePool, bytes]]) -> None:
        """Load the missing pages from the host tier; the row's present ones must not be evicted for them."""
        for pool, pages in zip(self._pools, self._index.shared(row.chain, matched), strict=True):
            for page in pages:
                if page != NULL_PAGE:
                    pool.pin(page)
                    pool.unpin((page,))
        wait.ticket = self.host.load(missing)
        wait.begun += 1
        wait.had = matched if wait.had is None else wait.had

    def _asks_below(self, row: Lookup, wait: TierWait) -> bool:
        """Ask the tiers below for pages that neither device nor host has, if a load pays."""
        host = self.host
        count, _ = self._index.match(row.chain, row.tokens, row.most, host.has)
        pages = row.most - count
        if pages < self.least_pages:
            return False
        tokens, missing = pages * self._page_size, pages * len(self._pools)
        weighed = None if row.transfer.claim else (tokens, missing, host.below.least_ns(missing))
        if weighed and not host.gate.pays(*weighed):
            self._decline(wait, tokens)
            wait.search = Search()  # finds nothing; the host's pages are weighed by themselves
            return False
        digests = row.chain.reach(row.most, row.tokens)
        held, wanted = [
            [(pool, digest) for pool in self._pools for digest in some]
            for some in (digests[:count], digests[count : row.most])
        ]
        wait.ticket = wait.search = search = host.ask(wanted, held, row.transfer)
        search.weighed, search.fits = weighed, self.fits_alone(row, wait)
        return True

    def _decline(self, wait: TierWait, tokens: int) -> None:
        """Count a declined load, once for a row: it may be weighed for several tiers."""
        if not wait.declined:
            wait.declined = True
            self.host.counts.slower += 1
            self.host.gate.declined(tokens)
