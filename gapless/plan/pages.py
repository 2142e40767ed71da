"""The pages of rows: taken as they grow, shared once they are full, given up when nothing reads them."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.base.records import PageWrite
from gapless.memory.index import PrefixIndex
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.rows import RowTable
from gapless.plan.row import Row


class RowPages:
    """Pages of rows in every group, and the page table entries of the plan being made."""

    def __init__(self, pools: Sequence[PagePool], table: RowTable, index: PrefixIndex | None) -> None:
        self.pools, self.index = pools, index
        self._table = table
        self.size = pools[0].page_size
        """Tokens of a page"""
        self.slide_away = any([pool.rule.window for pool in pools])
        """Whether some pages are given up before their row ends"""
        self.writes: list[PageWrite] = []

    def begin(self, row: Row) -> None:
        """Write the page table of a new row."""
        self.writes += [
            PageWrite(row.number, entry, page, group)
            for group, held in enumerate(row.by_group) for entry, page in enumerate(held) if page != NULL_PAGE
        ]  # fmt: skip

    def extend(self, row: Row, pages: int) -> None:
        """Take fresh pages for the row up to this many in every group."""
        number = row.number
        for group, held in enumerate(row.by_group):
            first, take = len(held), self.pools[group].take
            held += [take() for _ in range(first, pages)]
            self.writes += [PageWrite(number, entry, held[entry], group) for entry in range(first, pages)]

    def fit(self, row: Row, pages: int) -> bool:
        """Return whether the pools hold the pages that the row lacks."""
        return all([pages - len(held) <= pool.available() for held, pool in zip(row.by_group, self.pools, strict=True)])

    def slide(self, row: Row, tokens: int, last_step: int) -> None:
        """Retire the pages that have passed once `tokens` are known, unused after `last_step`."""
        for pool, held in zip(self.pools, row.by_group, strict=True):
            passed = pool.rule.passed(tokens, self.size)
            gone = held[passed.start : passed.stop]
            if any(gone):
                pool.retire(gone, last_step)
                held[passed.start : passed.stop] = [NULL_PAGE] * len(gone)

    def publish(self, row: Row, computed: int, step: int) -> None:
        """Make full pages shareable: the first `computed` tokens have KV once `step` has run."""
        assert self.index is not None and row.chain is not None
        pages = computed // self.size
        if pages > row.published:
            if not row.private:
                row.chain = row.chain.up_to(pages)
                tokens = self._table.tokens[row.number]
                self.index.publish(row.chain, tokens, row.by_group, row.published, pages, step)
            row.published = pages

    def next_digest(self, row: Row) -> bytes | None:
        """Return the digest of the page that a row in prefill computes next."""
        pages = row.published + 1
        if row.chain is None or row.private or pages * self.size > row.length or row.computed == row.length:
            return None
        row.chain = row.chain.up_to(pages)
        return row.chain.reach(pages, self._table.tokens[row.number])[pages - 1]

    def doubt(self, row: Row, others: Sequence[Row]) -> None:
        """Hide the pages of a failed row, and all pages of the rows that share any of them."""
        doubtful = [set(pages) - {NULL_PAGE} for pages in row.by_group]
        for other in others:
            if not all(map(set.isdisjoint, doubtful, other.by_group)):
                other.private = True
                for pool, pages in zip(self.pools, other.by_group, strict=True):
                    pool.hide(pages)

    def retire(self, row: Row) -> None:
        """Release the pages of a row, reusable after its last step."""
        for pool, pages in zip(self.pools, row.by_group, strict=True):
            pool.retire(pages, row.last_step)
