"""Admission: whether a request fits at all, and whether a row fits now.

The answer depends on shared pages, the row's needs, and the growth of running rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from gapless.base.errors import RequestError
from gapless.base.records import Request
from gapless.memory.index import NO_MATCH, Match, PrefixIndex
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.rows import RowTable
from gapless.memory.source import Lookup, PageSource
from gapless.plan.bounds import Bounds
from gapless.plan.row import Refusal, Row


class PageNeed(NamedTuple):
    """Page needs of a row to be admitted."""

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

    def __init__(
        self, pools: Sequence[PagePool], index: PrefixIndex | None, source: PageSource, bounds: Bounds, step_tokens: int
    ) -> None:
        self.index = index
        self.source = source
        self.expected = 0.0
        """Expected number of generated tokens: a mean over ended rows."""
        self.running = 0
        """Rows on the device."""
        self.full_at: tuple[int, ...] | None = None
        """The `state` when the head of the queue last did not fit"""
        self._changes = 0
        """Count of rows taken and left."""
        self._pools = pools
        self._bounds = bounds
        self._step_tokens = step_tokens
        self._page_size = pools[0].page_size

    def ended(self, generated: int) -> None:
        """Take in the length of a finished row."""
        self.expected += (generated - self.expected) / 8

    def preempted(self, generated: int) -> None:
        """Take in the length so far of a preempted row, a lower bound."""
        self.expected = max(self.expected, generated)

    def change(self, rows: int) -> None:
        """Note a row taken (1) or left (-1)."""
        self.running += rows
        self._changes += 1
        self.source.runs(self.running)

    def state(self) -> tuple[int, ...]:
        """Return a value that changes whenever a refused row may fit."""
        return (*[pool.available() for pool in self._pools], self.index.version if self.index else 0)

    def cacheable(self, row: Row) -> int:
        """Return how many pages of a waiting row the prefix index may give."""
        # The last known token always runs, for the next token's logits; so do tokens with wanted logits.
        return (row.length - 1 if row.scored == row.asked.to_score else row.scored) // self._page_size

    def match(self, row: Row) -> Match | None:
        """Return the pages that the prefix index has for a waiting row, and make the next page's digest known. None: it
        waits for pages of the source."""
        row.refusal = None
        if self.index is None or row.chain is None:
            return NO_MATCH
        assert row.tokens is not None
        most, tokens = self.cacheable(row), row.tokens
        row.chain = chain = row.chain.up_to(most)
        pages, short = self.pages_for(row, row.length), partial(self._short, row)
        lookup = Lookup(row.key, chain, tokens, most, pages, short, row.asked.transfer)
        if self.source.waits(lookup):
            return None
        match = self.index.match(chain, tokens, most)
        chain.reach(min(match.pages + 1, most), tokens)
        return None if self.source.loads(lookup, match) else match

    def _short(self, row: Row, matched: int) -> int:
        """Return the pages missing to admit a row with this many shared ones, growth included; 0 or less if it fits."""
        need = self._need(row, matched, self._shared(row, matched))
        return need.lack + need.reserve

    def _shared(self, row: Row, matched: int) -> list[list[int]]:
        """Return the pages of a match, a list a group."""
        return self.index.shared(row.chain, matched) if self.index and row.chain else [[] for _ in self._pools]

    def refused_before(self, row: Row) -> bool:
        """Return whether a refused row still cannot fit: too few pages came back, and no more are shared.

        Pages that others share with it, or evict, do not change the sum of its needs and the available pages; nor do
        rows that grow as expected. In a window group a shorter match may need less: the refusal stays.
        """
        refusal = row.refusal
        if refusal is None:
            return False
        if refusal.at != self._changes:
            row.refusal = refusal = refusal._replace(reserve=self.reserve(row), at=self._changes)
        if refusal.needs + refusal.reserve <= refusal.pool.released:
            return False
        return all([pool.lacks(digests) for pool, digests in refusal.gaps.items()])

    def reserve(self, row: Row) -> int:
        """Return the pages kept free for the growth of rows, this one included: admission must not cause preemption."""
        if not self.running:
            return 0
        growth = self._bounds.growth(int(self.expected), (row.asked.prompt, row.length, row.asked.max_len))
        # Half of the growth, since some end early and all of it would cost a quarter of the batch; and a last page a
        # row.
        return max(self.running // 8, -(-growth // (2 * self._page_size)) + self.running if growth else 0)

    def most_reserve(self, row: Row) -> int:
        """Return the upper bound of `reserve`: every row begins with nothing and runs to its limit."""
        return -(-(self._bounds.promised + row.asked.max_len) // (2 * self._page_size)) + self.running

    def pages_for(self, row: Row, computed: int) -> int:
        """Return the pages for known tokens up to `computed`; the last chunk may add tokens, and run all but the last
        of them."""
        if computed == row.length:
            computed = min(row.length + self._bounds.most, row.asked.max_len) - 1
        return -(-computed // self._page_size)

    def claim(self, row: Row, match: Match, most_writes: int) -> int | None:
        """Give the row pages for its known tokens, the ones of `match` shared, if they and their writes fit. Return
        the number of shared pages that it waited for, None if it does not fit."""
        matched = match.pages
        shared = self._shared(row, matched)
        need = self._need(row, matched, shared)
        if not need.fits:
            needs = need.lack + need.pool.released
            row.refusal = Refusal(need.pool, needs, need.reserve, self._changes, match.gaps)
            return None
        if len(self._pools) * self.pages_for(row, row.length) > most_writes:
            return None
        for pool, pages, count in zip(self._pools, shared, need.fresh, strict=True):
            for page in pages:
                if page != NULL_PAGE:
                    pool.pin(page)
            pages += [pool.take() for _ in range(count)]
        if self.index and row.chain and row.tokens is not None:
            self.index.describe(row.chain, row.tokens, 0, matched)
        row.by_group = shared
        row.computed, row.published, row.skips = matched * self._page_size, matched, 0
        return self.source.admitted(row.key, matched, self.cacheable(row) - matched)

    def _need(self, row: Row, matched: int, shared: list[list[int]]) -> PageNeed:
        """Return the page needs of a row with these `shared` pages."""
        total = self.pages_for(row, row.length)
        fresh, lacks = [], []
        for pool, pages in zip(self._pools, shared, strict=True):
            wanted = total - len(pages)
            if pool.rule.window:
                # Chunks take their pages as they write; the first chunk's must be free.
                first = min(row.length, matched * self._page_size + self._step_tokens)
                wanted = self.pages_for(row, first) - len(pages)
            fresh.append(0 if pool.rule.window else wanted)
            lacks.append(wanted + pool.resting(pages) - pool.available())
        lack = max(lacks)
        # Counting the growth costs more than all else here: skip it if the upper bound fits.
        reserve = self.reserve(row) if lack + self.most_reserve(row) > 0 else 0
        return PageNeed(fresh, self._pools[lacks.index(lack)], lack, reserve)


def check_fits(request: Request, pool: PagePool, rows: RowTable) -> None:
    """Raise RequestError if the request has no prompt, leaves no room for a token, or exceeds pages or rows."""
    if not 0 < len(request.tokens) <= len(request.known) < request.max_len:
        raise RequestError(
            f"the prompt has {len(request.tokens)} tokens: it must have at least one, and fewer than the "
            f"{request.max_len} of prompt and output together", "prompt")  # fmt: skip
    pages = -(-(request.max_len - 1) // pool.page_size)
    if pages > pool.size or request.max_len > rows.tokens.shape[1]:
        room = min(pool.size * pool.page_size + 1, rows.tokens.shape[1])
        raise RequestError(
            f"prompt and output need {request.max_len} tokens of KV memory, the engine has {room}: "
            "shorten the prompt or max_tokens", "max_tokens")  # fmt: skip
