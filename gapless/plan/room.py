"""Admission: whether a request fits at all, and whether a sequence fits now.

The answer depends on shared pages, the sequence's needs, and the growth of running rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Pools
from functools import partial
from typing import NamedTuple

from gapless.base.errors import RequestError
from gapless.base.records import PageWrite, Request
from gapless.memory.index import PrefixIndex
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.rows import RowTable
from gapless.memory.source import Lookup, PageSource
from gapless.plan.bounds import Bounds
from gapless.plan.sequence import Sequence


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

    def __init__(
        self, pools: Pools[PagePool], index: PrefixIndex | None, source: PageSource, bounds: Bounds, step_tokens: int
    ) -> None:
        self.index = index
        self.source = source
        self.expected = 0.0
        """Expected number of generated tokens: a mean over ended sequences."""
        self.running = 0
        """Sequences that hold a row."""
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
        self.source.runs(self.running)

    def state(self) -> tuple[int, ...]:
        """Return a value that changes whenever a refused sequence may fit."""
        return (*[pool.available() for pool in self._pools], self.index.version if self.index else 0)

    def cacheable(self, seq: Sequence) -> int:
        """Return how many pages of a waiting sequence the prefix index may give."""
        # The last known token always runs, for the next token's logits; so do tokens with wanted logits.
        return (seq.length - 1 if seq.scored == seq.to_score else seq.scored) // self._page_size

    def match(self, seq: Sequence) -> int | None:
        """Return how many leading pages the prefix index has for a waiting sequence, and make the next page's digest
        known. None: it waits for pages of the source."""
        seq.refused_by = None
        if self.index is None or seq.chain is None:
            return 0
        assert seq.tokens is not None
        most, tokens = self.cacheable(seq), seq.tokens
        seq.chain = chain = seq.chain.up_to(most)
        pages = self.pages_for(seq, seq.length)
        row = Lookup(seq.key, chain, tokens, most, pages, partial(self._short, seq), seq.transfer)
        if self.source.waits(row):
            return None
        matched, seq.gaps = self.index.match(chain, tokens, most)
        chain.reach(min(matched + 1, most), tokens)
        return None if self.source.loads(row, matched, seq.gaps) else matched

    def _short(self, seq: Sequence, matched: int) -> int:
        """Return the pages missing to admit a sequence with this many shared ones, growth included; 0 or less if it
        fits."""
        need = self._need(seq, matched, self.shared(seq, matched))
        return need.lack + need.reserve

    def shared(self, seq: Sequence, matched: int) -> list[list[int]]:
        """Return the pages of a match, a list a group."""
        return self.index.shared(seq.chain, matched) if self.index and seq.chain else [[] for _ in self._pools]

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
        shared = self.shared(seq, matched)
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
        if self.index and seq.chain and seq.tokens is not None:
            self.index.describe(seq.chain, seq.tokens, 0, matched)
        seq.by_group = shared
        seq.cached = seq.computed = matched * self._page_size
        seq.loaded = self.source.admitted(seq.key, matched, self.cacheable(seq) - matched) * self._page_size
        seq.published, seq.skips = matched, 0
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
