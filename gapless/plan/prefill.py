"""Sharing out a step's budget among the rows that have known tokens left to run."""

from __future__ import annotations

from collections.abc import Callable

from gapless.base.records import Chunk
from gapless.plan.row import Row

PlanTokens = Callable[[Row, int, bool], int]
"""Plans up to N more tokens of a row, with or without preemption; returns the planned number."""


class Prefill:
    """Rows in prefill, in rank order. A chunk that is not alone takes at most half of the remaining budget.

    So a short prompt gets its first token soon; the unused budget goes to the first in rank.
    """

    def __init__(self, rank: Callable[[Row], tuple[int, int]], run: PlanTokens) -> None:
        self.begun: dict[Row, int] = {}
        """Rows with a chunk in the step being planned, and the chunk's start."""
        self._rows: dict[int, Row] = {}
        self._rank, self._run = rank, run
        self.coming: dict[bytes, Row] = {}
        """Rows by the digest of the page they compute next."""
        self._expected: dict[int, bytes] = {}
        """These digests by row"""
        self.starved = False
        """Whether a row got no pages in the step being planned."""

    def __len__(self) -> int:
        return len(self._rows)

    def tokens(self) -> int:
        """Return the number of known tokens left to run."""
        return sum([row.length - row.computed for row in self._rows.values()])

    def remove(self, row: Row) -> None:
        """Remove a row whose known tokens are all planned, or that leaves."""
        del self._rows[row.number]
        self.expect(row, None)

    def begin(self, budget: int, waiting: bool) -> int:
        """Plan chunks of the rows in prefill; `waiting`: others may join. Returns the remaining budget."""
        self.begun.clear()
        order = self._order()
        for row in order:
            if row.number in self._rows:  # an earlier row may have preempted it
                budget -= self._chunk(row, budget, waiting or len(order) > 1, preempt=True)
        return budget

    def admit(self, row: Row, budget: int, waiting: bool) -> int:
        """Add a row with its first chunk; returns the chunk's tokens."""
        self._rows[row.number] = row
        return self._chunk(row, budget, waiting or len(self._rows) > 1)

    def fill_up(self, budget: int) -> None:
        """Give the remaining budget to rows that can take it, the first in rank first."""
        if budget > 0:
            for row in self._order():
                budget -= self._chunk(row, budget, False)

    def take(self) -> tuple[Chunk, ...]:
        """Return the chunks of the step, sampling ones first."""
        chunks = [
            Chunk(row.number, start, row.computed - start, row.computed == row.length)
            for row, start in self.begun.items()
        ]
        self.begun.clear()
        return tuple(sorted(chunks, key=lambda chunk: not chunk.last))

    def computes_for(self, row: Row, matched: int, most: int) -> bool:
        """Return whether a row of better rank computes the next page that a waiting row lacks."""
        if not self.coming or row.chain is None or matched == most:
            return False
        other = self.coming.get(row.chain.digests[matched])
        return other is not None and self._rank(other) < self._rank(row)

    def expect(self, row: Row, digest: bytes | None) -> None:
        """Set the digest of the page that a row computes next, None if it has none to share."""
        before = self._expected.pop(row.number, None)
        if before is not None and self.coming.get(before) is row:
            del self.coming[before]
        if digest is not None:
            self._expected[row.number] = digest
            self.coming.setdefault(digest, row)

    def _order(self) -> list[Row]:
        return sorted(self._rows.values(), key=self._rank) if len(self._rows) > 1 else list(self._rows.values())

    def _chunk(self, row: Row, budget: int, others: bool, preempt: bool = False) -> int:
        most, start = -(-budget // 2) if others else budget, row.computed
        count = self._run(row, most, preempt) if most > 0 and start < row.length else 0
        if count:
            self.begun.setdefault(row, start)
        return count
