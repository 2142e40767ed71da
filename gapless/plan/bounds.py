"""Bounds of each row's length, low and high, as columns over rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gapless.base.records import Int64s
from gapless.memory.rows import NULL_ROW, RowTable

UNREACHABLE = np.iinfo(np.int64).max // 2
PUBLISHED_TOKENS = 128
"""[tokens] A row's full pages are published after this many sampled tokens: one by one takes the loop twice as long."""

RowNumbers = npt.NDArray[np.int32] | Int64s


class Bounds:
    """Bounds of each row's known tokens after all its steps in flight. A step adds `least` to `most` tokens to a row.

    Columns over rows, int64: `least`, 0 for a row that steps may hold; `low` and `high`, counted from the settled
    `length` at every look, and one column while no row's differ; `limit`, the most tokens, 0 for a free row;
    `in_flight`, unobserved steps that may add tokens; `room`, the tokens that fit the row's pages. A step runs the last
    known token and may write KV for all but the last token that it adds, so n tokens need pages for n - 1.
    """

    def __init__(self, rows: RowTable, page_size: int, least: int, most: int, window: int | None = None) -> None:
        """`window` is the narrowest group's; its passed pages are given up."""
        assert 0 <= least <= most > 0
        self._rows, self.most = rows, most
        length = rows.length
        self.least = np.full_like(length, least)
        self._least, self._held = least, 0
        self.promised = 0
        """Most tokens of all rows together: the sum of their limits."""
        self.quiet = 0
        """Further steps in which no row of the set starts a page or finishes."""
        self._page_size = page_size
        self._run = max(1, min(PUBLISHED_TOKENS, window or PUBLISHED_TOKENS) // page_size)
        columns = np.zeros((9, len(length)), np.int64)
        self.low, self._high, self.limit, self.in_flight, self.room, self.prompt, self.shared, *others = columns
        self.member, self._next = others
        self.high = self.low if least == most else self._high
        # UNREACHABLE for rows that a comparison must not select.
        self._ends, self._fills = np.full((2, len(length)), UNREACHABLE)
        self._resumes = np.zeros_like(length)

    def begin(self, row: int, prompt: int, shared: int, limit: int, held: bool = False) -> None:
        """Start a row for a request, none of whose known tokens has run; the first `shared` have KV from other
        requests.

        `held`: steps may hold the row.
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
        self._fills[row] = UNREACHABLE
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
        """Count the row's last chunk, a step that samples."""
        self.in_flight[row] += 1

    def has_pages(self, rows: int | RowNumbers, pages: int | Int64s) -> None:
        """Set the number of pages of a row, or of each of several."""
        self.room[rows] = pages * self._page_size + 1

    def published(self, row: int, pages: int) -> None:
        """Note that the row's first full pages are published; sampled tokens fill the next ones."""
        self._fills[row] = (pages + self._run) * self._page_size + 1

    def publishes(self, row: int) -> bool:
        """Return whether all settled tokens of the row but the last have KV."""
        return bool(self._fills[row] != UNREACHABLE)

    def filled(self) -> list[tuple[int, int]]:
        """Return rows with full pages to publish, and the number of their tokens with KV: all settled ones but the
        last.

        These pages then count as published.
        """
        length = self.length
        rows = (length >= self._fills).nonzero()[0]
        if not len(rows):
            return []
        computed = length[rows] - 1
        self._fills[rows] = (computed // self._page_size + self._run) * self._page_size + 1
        return list(zip(rows.tolist(), computed.tolist(), strict=True))

    def growth(self, expected: int, seq: tuple[int, int, int]) -> int:
        """Return the peak number of tokens that the rows need beyond their present ones if each generates `expected`.

        `seq` is a candidate, (prompt, known, limit), which takes the null row's place here. When the row with the i-th
        most tokens to go ends, i rows have grown by as many, and the others have returned theirs (Gong et al.,
        "Past-Future Scheduler for LLM Serving under SLA Guarantees", 2025).
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
        """Return the pages that the row needs for one more step."""
        tokens = min(self.length[row] + self.most * (self.in_flight[row] + 1), self.limit[row]) - 1
        return int(-(-tokens // self._page_size))

    # The decode set, and one step of it.

    def look(self) -> None:
        """Recompute the bounds from the settled lengths and the steps in flight."""
        np.multiply(self.in_flight, self.least, out=self.low)
        np.add(self.low, self.length, out=self.low)
        if self.high is not self.low:
            np.multiply(self.in_flight, self.most, out=self.high)
            np.add(self.high, self.length, out=self.high)
            np.minimum(self.high, self.limit, out=self.high)

    def enter(self, row: int) -> None:
        self.member[row], self._ends[row], self.quiet = 1, self.limit[row], 0

    def leave(self, row: int) -> None:
        self.member[row], self._ends[row], self.quiet = 0, UNREACHABLE, 0

    def ends(self, row: int, ends: bool) -> None:
        """Set whether the row waits outside the set for its last tokens."""
        self._resumes[row] = self.limit[row] if ends else 0

    def ended(self) -> list[int]:
        """Return rows of the set with all tokens in flight."""
        rows: list[int] = (self.low >= self._ends).nonzero()[0].tolist()
        return rows

    def resumed(self) -> list[int]:
        """Return rows waiting for their last tokens that need more steps, since one of theirs held them."""
        rows: list[int] = (self.low < self._resumes).nonzero()[0].tolist()
        return rows

    def short(self, steps: int = 1) -> tuple[Int64s, Int64s, int]:
        """Return rows whose next steps may write past their pages, the pages each then needs, and the total missing."""
        np.add(self.high, self.most * steps, out=self._next)
        np.multiply(self._next, self.member, out=self._next)
        np.minimum(self._next, self.limit, out=self._next)
        rows = (self._next > self.room).nonzero()[0]
        size = self._page_size
        pages = (self._next[rows] + (size - 2)) // size
        return rows, pages, int((pages - (self.room[rows] - 1) // size).sum())

    def foresee(self) -> None:
        """Count the quiet steps: how often each row's high bound can grow within its pages and limit."""
        np.minimum(self.room, self.limit, out=self._next)
        np.subtract(self._next, self.high, out=self._next)
        reach = self._next[self.member > 0]
        self.quiet = max(0, int(reach.min()) // self.most) if len(reach) else 0

    def step(self) -> None:
        """Count one more step of the set."""
        np.add(self.in_flight, self.member, out=self.in_flight)
        self.quiet -= self.quiet > 0

    def observe(self, rows: RowNumbers | None) -> None:
        """Count an observed step of these rows; None: of the whole set."""
        if rows is None:
            np.subtract(self.in_flight, self.member, out=self.in_flight)
        else:
            self.in_flight[rows] = self.in_flight.take(rows) - 1
