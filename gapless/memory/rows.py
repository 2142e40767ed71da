"""The row table: a request's slot in the device tables, and its settled tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gapless.base.records import Int32s, Int64s
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.slots import Slots

NULL_ROW = 0
"""Target of padding and inert writes. It serves no request."""
NO_REQUEST = -1
MOST_UNWRITTEN = 64
"""Most steps written together"""


class RowTable:
    """Rows by number, with a generation that changes at every reuse.

    Arrays over rows: `key` [rows] int64 (NO_REQUEST after the request has left), `generation` [rows] int32.
    """

    def __init__(self, rows: int, max_len: int, ledger: Ledger) -> None:
        self._ledger = ledger
        self.free = list(range(rows, 0, -1))
        self.size = rows
        self.key = np.full(rows + 1, NO_REQUEST, np.int64)
        self.generation = np.zeros(rows + 1, np.int32)
        self._length = np.zeros(rows + 1, np.int64)
        self._tokens = np.zeros((rows + 1, max_len), np.int32)
        self._unwritten: list[Int32s] = []
        """Tokens of the steps since the last write, an array each: writing them together costs less."""
        self._unwritten_rows: Int64s = np.empty(0, np.int64)
        """Rows of all these steps"""
        self._appended = 0
        self.slots: dict[str, Slots] = {}
        """Leasable slots by name: a parameter whose column holds the slot, or an adapter's digest."""
        self.leased: dict[int, dict[str, int]] = {}
        """Row -> its leased slots, by name."""

    def available(self) -> int:
        return len(self.free)

    def lends(self, leases: Iterable[str]) -> bool:
        """Return whether each of these has a free slot."""
        return all([self.slots[name].available(name) for name in leases])

    def take(self, key: int, tokens: Int32s, leases: Iterable[str] = ()) -> int:
        """Return a row, with a slot for each of `leases`, for a request with these known tokens."""
        row = self.free.pop()
        self.leased[row] = {name: self.slots[name].take(name) for name in leases}
        self.key[row] = key
        self.generation[row] += 1
        self.length[row] = len(tokens)
        self.tokens[row, : len(tokens)] = tokens
        return row

    def append(self, rows: Int64s, tokens: Int32s) -> None:
        """Append settled tokens of N different rows: [N], or [N, W] with negative ones after a row's last. The arrays
        may not change afterwards."""
        steps = self._unwritten
        alike = steps and rows is self._unwritten_rows and tokens.shape == steps[0].shape
        if steps and not (alike and len(steps) < MOST_UNWRITTEN):
            self._write()
        self._unwritten_rows = rows
        steps.append(tokens)

    def _write(self) -> None:
        """Write the steps appended since the last write."""
        rows, steps, tokens = self._unwritten_rows, len(self._unwritten), np.array(self._unwritten)
        self._unwritten.clear()
        if tokens.ndim == 2:
            self._tokens[rows[:, None], self._length[rows][:, None] + np.arange(steps)] = tokens.T
            self._length[rows] += steps
            self._appended += tokens.size
            return
        taken = tokens >= 0
        for index, row in enumerate(rows.tolist()):
            new, begin = tokens[:, index][taken[:, index]], self._length[row]
            self._tokens[row, begin : begin + len(new)] = new
            self._length[row] = begin + len(new)
            self._appended += len(new)

    @property
    def tokens(self) -> Int32s:
        """int32 [rows, max_len]; each row has `length` of them."""
        if self._unwritten:
            self._write()
        return self._tokens

    @property
    def length(self) -> Int64s:
        """Known tokens of each row, int64 [rows]."""
        if self._unwritten:
            self._write()
        return self._length

    @property
    def appended(self) -> int:
        """Number of appended tokens."""
        if self._unwritten:
            self._write()
        return self._appended

    def count_anew(self) -> None:
        """Count appended tokens from here."""
        self._appended -= self.appended

    def settled(self, row: int) -> Int32s:
        """Return a copy of the row's known tokens."""
        return self.tokens[row, : self.length[row]].copy()

    def retire(self, row: int, last_step: int) -> None:
        """Release row and slots, reusable once `last_step`, the request's last, has completed."""
        self.key[row] = NO_REQUEST
        for name, slot in self.leased.pop(row).items():
            self.slots[name].retire(slot, last_step)
        self._ledger.retire((Clock.COMPUTE, last_step), self.free.append, row)
