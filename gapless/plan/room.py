"""Admission: whether a request fits at all, and whether a sequence fits now.

The answer depends on shared pages, the sequence's needs, and the growth of running rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Pools
from typing import NamedTuple

from gapless.base.errors import RequestError
from gapless.base.records import PageWrite, Request
from gapless.memory.index import PrefixIndex
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.rows import RowTable
from gapless.offload.host import HostTier
from gapless.offload.search import LoadTicket, Search
from gapless.plan.bounds import Bounds
from gapless.plan.sequence import Sequence

MOST_LOADS = 2
"""How often a sequence waits for pages of the host tier before it computes pages that others evicted."""


class PageNeed(NamedTuple):
    """Page needs of a sequence to be admitted."""

    fresh: list[int]
    """New pages, by group"""
    pool: PagePool
    """The tightest pool"""
    lack: int
    """Pages missing in that pool; negative if it has more"""
    reserve: int
    """Further pages that must stay free"""

    @property
    def fits(self) -> bool:
        return self.lack + self.reserve <= 0


class Room:
    """The pools as admission sees them. `step_tokens` is the budget of a step."""

    def __init__(self, pools: Pools[PagePool], index: PrefixIndex | None, bounds: Bounds, step_tokens: int) -> None:
        self.index = index
        self.host: HostTier | None = None
        """Copies of pages in host memory, if any."""
        self.expected = 0.0
        """Expected number of generated tokens: a mean over ended sequences."""
        self.running = 0
        """Sequences that hold a row."""
        self._early: dict[int, int] = {}
        """Page needs of sequences with loads before admission, by key"""
        self._changes = 0
        """Count of rows taken and left."""
        self._pools = pools
        self._bounds = bounds
        self._step_tokens = step_tokens
        self._page_size = pools[0].page_size

    def ended(self, generated: int) -> None:
        """Take in the length of a finished sequence."""
        self.expected += (generated - self.expected) / 8

    def preempted(self, generated: int) -> None:
        """Take in the length so far of a preempted sequence, a lower bound."""
        self.expected = max(self.expected, generated)

    def change(self, rows: int) -> None:
        """Note a row taken (1) or left (-1)."""
        self.running += rows
        self._changes += 1
        if self.host is not None:
            self.host.running = self.running

    @property
    def loading(self) -> bool:
        """Return whether pages are being loaded from a tier; any sequence may share them."""
        return self.host is not None and self.host.loading

    def begin(self, seq: Sequence) -> None:
        """Announce a queued sequence to peers that may wait for its pages."""
        if seq.transfer.offer and self.host is not None:
            self.host.below.begin(seq.transfer.offer)

    def end(self, seq: Sequence, whole: bool) -> None:
        """Note an ended sequence. `whole`: its prompt was computed, and peers get its pages."""
        if seq.transfer.offer and self.host is not None:
            digests = seq.chain.digests[: seq.prompt // self._page_size] if whole and seq.chain is not None else []
            self.host.end(seq.transfer.offer, digests)

    def state(self) -> tuple[int, ...]:
        """Return a value that changes whenever a refused sequence may fit."""
        return (*[pool.available() for pool in self._pools], self.index.version if self.index else 0)

    def cacheable(self, seq: Sequence) -> int:
        """Return how many pages of a waiting sequence the prefix index may give."""
        # The last known token always runs, for the next token's logits; so do tokens with wanted logits.
        return (seq.length - 1 if seq.scored == seq.to_score else seq.scored) // self._page_size

    def match(self, seq: Sequence) -> int:
        """Return how many leading pages the prefix index has for a waiting sequence, and make the next page's digest
        known."""
        seq.refused_by = None
        if seq.ticket is not None and self.host is not None and self._waits(self.host, seq):
            return 0
        if self.index is None or seq.chain is None or seq.tokens is None:
            return 0
        most = self.cacheable(seq)
        seq.chain = seq.chain.up_to(most)
        matched, seq.gaps = self.index.match(seq.chain, seq.tokens, most)
        seq.chain.reach(min(matched + 1, most), seq.tokens)
        return matched

    def _waits(self, host: HostTier, seq: Sequence) -> bool:
        """Return whether a sequence still waits for an answer of the tiers; after a vain wait it asks no more."""
        assert seq.ticket is not None
        if host.waits(seq.ticket):
            if isinstance(seq.ticket, Search):
                self._load_early(host, seq, seq.ticket)
            return True
        if isinstance(seq.ticket, LoadTicket) and seq.ticket.given_up:
            seq.loads_begun = MOST_LOADS
        if isinstance(search := seq.ticket, Search) and search.weighed and not (search.fetched or search.found):
            host.gate.begun(*search.weighed)  # without a load the next request must not ask again
        seq.ticket = None
        return False

    def _load_early(self, host: HostTier, seq: Sequence, search: Search) -> None:
        """Load the pages that a running search has brought, if the sequence fits."""
        search.fits = self.fits_alone(seq)
        if not (search.came and search.fits):
            return
        if seq.had is None and self.index is not None and seq.chain is not None and seq.tokens is not None:
            seq.had, _ = self.index.match(seq.chain, seq.tokens, self.cacheable(seq))
        host.counts.hit += host.load_early(search) // len(self._pools)

    def fits_alone(self, seq: Sequence) -> bool:
        """Return whether a sequence fits without shared pages, beside the others with early loads: else loads for one
        would evict another's."""
        need = self._need(seq, 0, [[] for _ in self._pools])
        others = sum([pages for key, pages in self._early.items() if key != seq.key])
        fits = need.lack + need.reserve + others <= 0
        if fits:
            self._early[seq.key] = self.pages_for(seq, seq.length)
        return fits

    def waits_for_load(self, seq: Sequence, matched: int) -> bool:
        """Return whether a just matched sequence waits for tier pages beyond the `matched` ones.

        A load begins only if the sequence could be admitted now: it needs these pages anyway.
        """
        if self.host is None or seq.ticket is not None:
            return seq.ticket is not None
        return seq.loads_begun < MOST_LOADS and self._begin_load(self.host, seq, matched)

    def give_up(self, seq: Sequence) -> None:
        """Drop the loads of a sequence that ends while it waits."""
        if isinstance(seq.ticket, LoadTicket):
            seq.ticket.given_up = True
        elif seq.ticket is not None:
            seq.ticket.open = {}  # the loop would wake at its deadline, for an ended request
        if seq.search is not None:
            seq.search.end()
        self._early.pop(seq.key, None)
        seq.ticket = seq.search = None

    def _begin_load(self, host: HostTier, seq: Sequence, matched: int) -> bool:
        if self.index is None or seq.chain is None or seq.tokens is None:
            return False
        most = self.cacheable(seq)
        fetched = seq.search is not None and seq.search.fetched
        least = 1 if fetched else host.least_pages  # fetched pages are always loaded
        if most - matched < least:
            return False
        if host.below.lines and seq.search is None and self._asks_below(host, seq, most):
            return True
        found = seq.search.found if seq.search is not None else {}

        def has(pool: PagePool, digest: bytes) -> bool:
            return host.has(pool, digest) or host.key(pool, digest) in found

        if not any([has(pool, digest) for pool, digests in seq.gaps.items() for digest in digests]):
            return False  # while these are missing, no match is longer
        count, _ = self.index.match(seq.chain, seq.tokens, most, has)
        shared = self.index.shared(seq.chain, matched)
        if count - matched < least or not self._need(seq, matched, shared).fits:
            return False
        missing, tokens = self.index.missing(seq.chain, count), (count - matched) * self._page_size
        lacks = [host.key(pool, digest) for pool, digest in missing if not host.has(pool, digest)]
        below_ns = sum([host.gate.page_ns(found[key]) for key in lacks if key in found])
        weighed = not (seq.transfer.claim or fetched)
        if weighed and not host.gate.pays(tokens, len(missing), below_ns):
            self._decline(host, seq, tokens)
            if seq.search is not None and found:
                seq.search.found = {}  # the host's pages may pay by themselves
                return self._begin_load(host, seq, matched)
            seq.loads_begun = MOST_LOADS
            return False
        if weighed:
            host.gate.begun(tokens, len(missing), below_ns)
        if seq.search is not None:
            seq.search.fits = self.fits_alone(seq)
        if seq.search is not None and host.fetch(seq.search, missing):
            if not seq.search.open:  # transfers hold every slot: only the host's pages are left
                return self._begin_load(host, seq, matched)
            seq.ticket = seq.search
            return True
        for pool, pages in zip(self._pools, shared, strict=True):
            for page in pages:
                if page != NULL_PAGE:  # its present pages must not be evicted for the missing ones
                    pool.pin(page)
                    pool.unpin((page,))
        host.counts.hit += count - matched
        seq.ticket = host.load(missing)
        seq.loads_begun += 1
        seq.had = matched if seq.had is None else seq.had
        return True

    def _asks_below(self, host: HostTier, seq: Sequence, most: int) -> bool:
        """Ask the tiers below for pages that neither device nor host has, if a load pays."""
        assert self.index is not None and seq.chain is not None and seq.tokens is not None
        count, _ = self.index.match(seq.chain, seq.tokens, most, host.has)
        pages = most - count
        if pages < host.least_pages:
            return False
        tokens, missing = pages * self._page_size, pages * len(self._pools)
        weighed = None if seq.transfer.claim else (tokens, missing, host.below.least_ns(missing))
        if weighed and not host.gate.pays(*weighed):
            self._decline(host, seq, tokens)
            seq.search = Search()  # finds nothing; the host's pages are weighed by themselves
            return False
        digests = seq.chain.reach(most, seq.tokens)
        held, wanted = [
            [(pool, digest) for pool in self._pools for digest in some]
            for some in (digests[:count], digests[count:most])
        ]
        seq.ticket = seq.search = host.ask(wanted, held, seq.transfer)
        seq.search.weighed, seq.search.fits = weighed, self.fits_alone(seq)
        return True

    def _decline(self, host: HostTier, seq: Sequence, tokens: int) -> None:
        """Count a declined load, once for a request: it may be weighed for several tiers."""
        if not seq.declined:
            seq.declined = True
            host.counts.slower += 1
            host.gate.declined(tokens)

    def refused_before(self, seq: Sequence) -> bool:
        """Return whether a refused sequence still cannot fit: too few pages came back, and no more are shared.

        Pages that others share with it, or evict, do not change the sum of its needs and the available pages; nor do
        rows that grow as expected. In a window group a shorter match may need less: the refusal stays.
        """
        if seq.refused_by is None:
            return False
        if seq.refused_at != self._changes:
            seq.reserve, seq.refused_at = self.reserve(seq), self._changes
        if seq.needs + seq.reserve <= seq.refused_by.released:
            return False
        return all([pool.lacks(digests) for pool, digests in seq.gaps.items()])

    def reserve(self, seq: Sequence) -> int:
        """Return the pages kept free for the growth of rows, this one included: admission must not cause preemption."""
        if not self.running:
            return 0
        growth = self._bounds.growth(int(self.expected), (seq.prompt, seq.length, seq.max_len))
        # Half of the growth, since some end early and all of it would cost a quarter of the batch; and a last page a
        # row.
        return max(self.running // 8, -(-growth // (2 * self._page_size)) + self.running if growth else 0)

    def most_reserve(self, seq: Sequence) -> int:
        """Return the upper bound of `reserve`: every row begins with nothing and runs to its limit."""
        return -(-(self._bounds.promised + seq.max_len) // (2 * self._page_size)) + self.running

    def pages_for(self, seq: Sequence, computed: int) -> int:
        """Return the pages for known tokens up to `computed`; the last chunk may add tokens, and run all but the last
        of them."""
        if computed == seq.length:
            computed = min(seq.length + self._bounds.most, seq.max_len) - 1
        return -(-computed // self._page_size)

    def claim(self, seq: Sequence, matched: int, most_writes: int) -> bool:
        """Give the sequence pages for its known tokens, `matched` of them shared, if they and their writes fit."""
        shared = self.index.shared(seq.chain, matched) if self.index and seq.chain else [[] for _ in self._pools]
        need = self._need(seq, matched, shared)
        if not need.fits:
            seq.refused_by, seq.needs = need.pool, need.lack + need.pool.released
            seq.reserve, seq.refused_at = need.reserve, self._changes
            return False
        if len(self._pools) * self.pages_for(seq, seq.length) > most_writes:
            return False
        for pool, pages, count in zip(self._pools, shared, need.fresh, strict=True):
            for page in pages:
                if page != NULL_PAGE:
                    pool.pin(page)
            pages += [pool.take() for _ in range(count)]
        if self.host is not None:
            self.host.counts.missed += self.cacheable(seq) - matched
        if self.index and seq.chain and seq.tokens is not None:
            self.index.describe(seq.chain, seq.tokens, 0, matched)
        seq.by_group = shared
        seq.cached = seq.computed = matched * self._page_size
        seq.loaded = 0 if seq.had is None else max(0, matched - seq.had) * self._page_size
        if seq.search is not None:
            seq.search.end()
        self._early.pop(seq.key, None)
        seq.published, seq.skips, seq.loads_begun, seq.search, seq.had = matched, 0, 0, None, None
        seq.declined = False
        return True

    def _need(self, seq: Sequence, matched: int, shared: list[list[int]]) -> PageNeed:
        """Return the page needs of a sequence with these `shared` pages."""
        total = self.pages_for(seq, seq.length)
        fresh, lacks = [], []
        for pool, pages in zip(self._pools, shared, strict=True):
            wanted = total - len(pages)
            if pool.group.window:
                # Chunks take their pages as they write; the first chunk's must be free.
                first = min(seq.length, matched * self._page_size + self._step_tokens)
                wanted = self.pages_for(seq, first) - len(pages)
            fresh.append(0 if pool.group.window else wanted)
            lacks.append(wanted + pool.resting(pages) - pool.available())
        lack = max(lacks)
        # Counting the growth costs more than all else here: skip it if the upper bound fits.
        reserve = self.reserve(seq) if lack + self.most_reserve(seq) > 0 else 0
        return PageNeed(fresh, self._pools[lacks.index(lack)], lack, reserve)

    def writes(self, seq: Sequence) -> list[PageWrite]:
        """Return the page table entries of a new row."""
        return [
            PageWrite(seq.row, entry, page, group)
            for group, held in enumerate(seq.by_group) for entry, page in enumerate(held) if page != NULL_PAGE
        ]  # fmt: skip


def check_fits(request: Request, pool: PagePool, rows: RowTable) -> None:
    """Raise RequestError if the request has no prompt, leaves no room for a token, or exceeds pages or rows."""
    if not 0 < len(request.tokens) < request.max_len:
        raise RequestError(
            f"the prompt has {len(request.tokens)} tokens: it must have at least one, and fewer than the "
            f"{request.max_len} of prompt and output together", "prompt")  # fmt: skip
    pages = -(-(request.max_len - 1) // pool.page_size)
    if pages > pool.size or request.max_len > rows.tokens.shape[1]:
        room = min(pool.size * pool.page_size + 1, rows.tokens.shape[1])
        raise RequestError(
            f"prompt and output need {request.max_len} tokens of KV memory, the engine has {room}: "
            "shorten the prompt or max_tokens", "max_tokens")  # fmt: skip
