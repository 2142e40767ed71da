"""Bounds of each row's length, low and high, as columns over rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gapless.base.records import Int64s
from gapless.memory.rows import NULL_ROW, RowTable

NEVER = np.iinfo(np.int64).max // 2
PUBLISHED_TOKENS = 128
"""Sampled tokens of a row whose pages are published at one go: page by page that takes the loop twice as long."""

Rows = npt.NDArray[np.int32] | Int64s


class Bounds:
    """Bounds of the known tokens of each row once all its steps in flight have run. A step adds `least` to `most`.

    Columns over rows, int64: `least`, which is 0 for a row that steps may hold; `low` and `high`, counted from the
    settled `length` at every look, and one column while no row's differ; `limit`, the most tokens, 0 for a free row;
    `in_flight`, steps that may add tokens and are not observed; `room`, how many tokens fit the row's pages. A step
    runs the last known token and may write KV for all but the last that it adds, so n tokens need pages for n - 1.
    """

    def __init__(self, rows: RowTable, page_size: int, least: int, most: int, window: int | None = None) -> None:
        """`window` is that of the narrowest group of pages, which gives pages up that it has passed."""
        assert 0 <= least <= most > 0
        self._rows, self.most = rows, most
        length = rows.length
        self.least = np.full_like(length, least)
        self._least, self._held = least, 0
        self.promised = 0
        """Tokens that all rows together may come to: the sum of their limits."""
        self.quiet = 0
        """Further steps of the set in which surely no row of it begins a page or ends."""
        self._page_size = page_size
        self._run = max(1, min(PUBLISHED_TOKENS, window or PUBLISHED_TOKENS) // page_size)
        columns = np.zeros((9, len(length)), np.int64)
        self.low, self._high, self.limit, self.in_flight, self.room, self.prompt, self.shared, *others = columns
        self.member, self._next = others
        self.high = self.low if least == most else self._high
        # Out of reach for rows that a comparison must not select.
        self._ends, self._fills = np.full((2, len(length)), NEVER)
        self._resumes = np.zeros_like(length)

    def begin(self, row: int, prompt: int, shared: int, limit: int, held: bool = False) -> None:
        """The row begins to serve a request, none of whose known tokens has run; others had the first `shared`.

        `held` is whether steps may hold it.
        """
        if held:
            self._hold(row)
        self.limit[row], self.prompt[row], self.shared[row] = limit, prompt, shared
        self.promised += limit
        self.low[row] = self.high[row] = self.length[row]

    @property
    def length(self) -> Int64s:
        """Settled tokens of each row."""
        return self._rows.length

    def clear(self, row: int) -> None:
        """Mark the row as free."""
        self.promised -= int(self.limit[row])
        self.limit[row] = self.room[row] = self.in_flight[row] = self._resumes[row] = 0
        self._fills[row] = NEVER
        if self.least[row] != self._least:
            self.least[row] = self._least
            self._held -= 1
            self.high = self.low if self._least == self.most and not self._held else self._high

    def _hold(self, row: int) -> None:
        if self.high is self.low:
            np.copyto(self._high, self.low)
            self.high = self._high
        self._held += self.least[row] > 0
        self.least[row] = 0

    def sampled(self, row: int) -> None:
        """A step of its own that samples, its last chunk, is planned for the row."""
        self.in_flight[row] += 1

    def has_pages(self, rows: int | Rows, pages: int | Int64s) -> None:
        """A row, or each of several, has this many pages."""
        self.room[rows] = pages * self._page_size + 1

    def published(self, row: int, pages: int) -> None:
        """The row's first full pages have been published; from here on sampled tokens fill its pages."""
        self._fills[row] = (pages + self._run) * self._page_size + 1

    def publishes(self, row: int) -> bool:
        """Return whether all settled tokens of the row but the last have their KV."""
        return bool(self._fills[row] != NEVER)

    def filled(self) -> list[tuple[int, int]]:
        """Rows with further full pages to publish, and their tokens that have their KV: all settled ones but the last.

        These pages count as published from now on.
        """
        length = self.length
        rows = (length >= self._fills).nonzero()[0]
        if not len(rows):
            return []
        computed = length[rows] - 1
        self._fills[rows] = (computed // self._page_size + self._run) * self._page_size + 1
        return list(zip(rows.tolist(), computed.tolist(), strict=True))

    def growth(self, expected: int, seq: tuple[int, int, int]) -> int:
        """Tokens that the rows will need beyond those they have, at the worst moment, if each generates `expected`.

        `seq` is one more that would join, (prompt, known, limit); the null row stands for it meanwhile. When the row
        with the i-th most tokens to go has ended, i rows have grown by as many, and the others have given theirs back
        (Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", 2025).
        """
        self.prompt[NULL_ROW], self.high[NULL_ROW], self.limit[NULL_ROW] = seq
        rows = self.limit.nonzero()[0]
        high, limit = self.high.take(rows), self.limit.take(rows)
        to_go = np.minimum(np.maximum(self.prompt.take(rows) + expected - high, expected // 4), limit - high)
        order = to_go.argsort()[::-1]
        back = (high - self.shared.take(rows)).take(order)
        grown = np.arange(1, len(rows) + 1) * to_go.take(order) + back.cumsum()
        most = int(np.maximum.reduce(grown) - np.add.reduce(back))
        self.high[NULL_ROW] = self.limit[NULL_ROW] = 0
        return most

    def has_ended(self, row: int) -> bool:
        """Return whether all tokens of the row are in flight."""
        return bool(self.length[row] + self.least[row] * self.in_flight[row] >= self.limit[row])

    def wants(self, row: int) -> int:
        """Pages of the row after one step more."""
        tokens = min(self.length[row] + self.most * (self.in_flight[row] + 1), self.limit[row]) - 1
        return int(-(-tokens // self._page_size))

    # The decode set, and one step of it.

    def look(self) -> None:
        """Count the bounds from what is settled and in flight now."""
        np.multiply(self.in_flight, self.least, out=self.low)
        np.add(self.low, self.length, out=self.low)
        if self.high is not self.low:
            np.multiply(self.in_flight, self.most, out=self.high)
            np.add(self.high, self.length, out=self.high)
            np.minimum(self.high, self.limit, out=self.high)

    def enter(self, row: int) -> None:
        self.member[row], self._ends[row], self.quiet = 1, self.limit[row], 0

    def leave(self, row: int) -> None:
        self.member[row], self._ends[row], self.quiet = 0, NEVER, 0

    def ends(self, row: int, ends: bool) -> None:
        """Set whether the row waits outside of the set for its last tokens."""
        self._resumes[row] = self.limit[row] if ends else 0

    def ended(self) -> list[int]:
        """Rows of the set all of whose tokens are in flight."""
        rows: list[int] = (self.low >= self._ends).nonzero()[0].tolist()
        return rows

    def resumed(self) -> list[int]:
        """Rows that wait for their last tokens, and turn out to need more steps: one of them held the row."""
        rows: list[int] = (self.low < self._resumes).nonzero()[0].tolist()
        return rows

    def short(self, steps: int = 1) -> tuple[Int64s, Int64s, int]:
        """Rows of the set whose next steps may write past their pages, the pages they need then, and all that lack."""
        np.add(self.high, self.most * steps, out=self._next)
        np.multiply(self._next, self.member, out=self._next)
        np.minimum(self._next, self.limit, out=self._next)
        rows = (self._next > self.room).nonzero()[0]
        size = self._page_size
        pages = (self._next[rows] + (size - 2)) // size
        return rows, pages, int((pages - (self.room[rows] - 1) // size).sum())

    def foresee(self) -> None:
        """Count the quiet steps: how often the highest bound of each row can grow within its pages and its limit."""
        np.minimum(self.room, self.limit, out=self._next)
        np.subtract(self._next, self.high, out=self._next)
        reach = self._next[self.member > 0]
        self.quiet = max(0, int(reach.min()) // self.most) if len(reach) else 0

    def step(self) -> None:
        """The set takes part in one step more."""
        np.add(self.in_flight, self.member, out=self.in_flight)
        self.quiet -= self.quiet > 0

    def observe(self, rows: Rows | None) -> None:
        """A step of these rows was observed; None: of the whole set."""
        if rows is None:
            np.subtract(self.in_flight, self.member, out=self.in_flight)
        else:
            self.in_flight[rows] = self.in_flight.take(rows) - 1
