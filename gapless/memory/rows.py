"""The row table: a request's slot in the device tables, and its settled tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gapless.base.records import Int32s, Int64s
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.slots import Lease

NULL_ROW = 0
"""Padding and inert writes go here. It serves no request."""
NO_REQUEST = -1


class RowTable:
    """Rows by number, with a generation that changes at every reuse.

    Arrays over rows, settled values only: `key` [rows] int64 (NO_REQUEST when the request has left), `generation`
    [rows] int32, `length` [rows] int64 known tokens, `tokens` [rows, max_len] int32.
    """

    def __init__(self, rows: int, max_len: int, ledger: Ledger) -> None:
        self._ledger = ledger
        self.free = list(range(rows, 0, -1))
        self.size = rows
        self.key = np.full(rows + 1, NO_REQUEST, np.int64)
        self.generation = np.zeros(rows + 1, np.int32)
        self.length = np.zeros(rows + 1, np.int64)
        self.tokens = np.zeros((rows + 1, max_len), np.int32)
        self.slots: dict[str, Lease] = {}
        """What rows may lease, by its name: a parameter whose column holds the slot, or the digest of an adapter."""
        self.leased: dict[int, dict[str, int]] = {}
        """Row -> the slots that it leases, by the same names."""

    def available(self) -> int:
        return len(self.free)

    def lends(self, leases: Iterable[str]) -> bool:
        """Return whether each of these has a free slot."""
        return all([self.slots[name].available(name) for name in leases])

    def take(self, key: int, tokens: Int32s, leases: Iterable[str] = ()) -> int:
        """A row, with a slot for each of `leases`, for a request whose known tokens are these."""
        row = self.free.pop()
        self.leased[row] = {name: self.slots[name].take(name) for name in leases}
        self.key[row] = key
        self.generation[row] += 1
        self.length[row] = len(tokens)
        self.tokens[row, : len(tokens)] = tokens
        return row

    def append(self, rows: Int32s, tokens: Int32s, places: Int64s | None = None) -> None:
        """Append settled tokens: one entry per token, those of a row together and in order. `places` number those of
        each row from 0; without them each has one, or one row has all."""
        count = len(rows)
        if count and (row := rows[0]) == rows[-1]:  # one row alone: numbers take less than arrays
            begin = self.length[row]
            self.tokens[row, begin : begin + count] = tokens
            self.length[row] = begin + count
            return
        length = self.length.take(rows)
        if places is not None:
            length += places
        self.tokens[rows, length] = tokens
        self.length[rows] = length + 1  # of one row's entries the last one counts: numpy assigns in order

    def settled(self, row: int) -> Int32s:
        """A copy of the row's known tokens."""
        return self.tokens[row, : self.length[row]].copy()

    def retire(self, row: int, last_step: int) -> None:
        """The request leaves; row and slots are reusable once `last_step`, its last step, has completed."""
        self.key[row] = NO_REQUEST
        for name, slot in self.leased.pop(row).items():
            self.slots[name].retire(slot, last_step)
        self._ledger.retire(((Clock.COMPUTE, last_step),), self.free.append, row)
