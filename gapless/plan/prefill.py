"""Sharing out a step's budget among the rows that have known tokens left to run."""

from __future__ import annotations

from collections.abc import Callable

from gapless.base.records import Chunk
from gapless.plan.sequence import Sequence

PlanTokens = Callable[[Sequence, int, bool], int]
"""Plans up to N more tokens of a row, with or without preemption; returns the planned number."""


class Prefill:
    """Rows in prefill, in rank order. A chunk that is not alone takes at most half of the remaining budget.

    So a short prompt gets its first token soon; the unused budget goes to the first in rank.
    """

    def __init__(self, rank: Callable[[Sequence], tuple[int, int]], run: PlanTokens) -> None:
        self.begun: dict[Sequence, int] = {}
        """Rows with a chunk in the step being planned, and the chunk's start."""
        self._rows: dict[int, Sequence] = {}
        self._rank, self._run = rank, run
        self.coming: dict[bytes, Sequence] = {}
        """Rows by the digest of the page they compute next."""

    def __len__(self) -> int:
        return len(self._rows)

    def tokens(self) -> int:
        """Return the number of known tokens left to run."""
        return sum([seq.length - seq.computed for seq in self._rows.values()])

    def remove(self, seq: Sequence) -> None:
        """Remove a row whose known tokens are all planned, or that leaves."""
        del self._rows[seq.row]
        self.expect(seq, None)

    def begin(self, budget: int, waiting: bool) -> int:
        """Plan chunks of the rows in prefill; `waiting`: others may join. Returns the remaining budget."""
        self.begun.clear()
        order = self._order()
        for seq in order:
            if seq.row in self._rows:  # an earlier row may have preempted it
                budget -= self._chunk(seq, budget, waiting or len(order) > 1, preempt=True)
        return budget

    def admit(self, seq: Sequence, budget: int, waiting: bool) -> int:
        """Add a row with its first chunk; returns the chunk's tokens."""
        self._rows[seq.row] = seq
        return self._chunk(seq, budget, waiting or len(self._rows) > 1)

    def fill_up(self, budget: int) -> None:
        """Give the remaining budget to rows that can take it, the first in rank first."""
        if budget > 0:
            for seq in self._order():
                budget -= self._chunk(seq, budget, False)

    def take(self) -> tuple[Chunk, ...]:
        """Return the chunks of the step, sampling ones first."""
        chunks = [
            Chunk(seq.row, start, seq.computed - start, seq.computed == seq.length) for seq, start in self.begun.items()
        ]
        self.begun.clear()
        return tuple(sorted(chunks, key=lambda chunk: not chunk.last))

    def computes_for(self, seq: Sequence, matched: int, most: int) -> bool:
        """Return whether a row of better rank computes the next page that a waiting sequence lacks."""
        if not self.coming or seq.chain is None or matched == most:
            return False
        other = self.coming.get(seq.chain.digests[matched])
        return other is not None and self._rank(other) < self._rank(seq)

    def expect(self, seq: Sequence, digest: bytes | None) -> None:
        """Set the digest of the page that a row computes next, None if it has none to share."""
        if seq.coming is not None and self.coming.get(seq.coming) is seq:
            del self.coming[seq.coming]
        seq.coming = digest
        if digest is not None:
            self.coming.setdefault(digest, seq)

    def _order(self) -> list[Sequence]:
        return sorted(self._rows.values(), key=self._rank) if len(self._rows) > 1 else list(self._rows.values())

    def _chunk(self, seq: Sequence, budget: int, others: bool, preempt: bool = False) -> int:
        most, start = -(-budget // 2) if others else budget, seq.computed
        count = self._run(seq, most, preempt) if most > 0 and start < seq.length else 0
        if count:
            self.begun.setdefault(seq, start)
        return count
