"""The row table: rows, generations, settled tokens."""

from __future__ import annotations

import numpy as np

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.rows import NO_REQUEST, NULL_ROW, RowTable


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_every_row_is_handed_out_once_and_the_null_row_never():
    table = RowTable(5, 8, Ledger())
    rows = [table.take(key, ids(1)) for key in range(5)]
    assert sorted(rows) == [1, 2, 3, 4, 5] and NULL_ROW not in rows
    assert table.available() == 0
    assert table.key[rows].tolist() == [0, 1, 2, 3, 4] and table.key[NULL_ROW] == NO_REQUEST


def test_a_row_in_flight_has_no_owner_at_once_and_is_free_later():
    ledger = Ledger()
    table = RowTable(2, 8, ledger)
    row = table.take(7, ids(1, 2))
    table.retire(row, last_step=2)
    assert table.key[row] == NO_REQUEST and table.available() == 1
    ledger.advance(Clock.COMPUTE, 1)
    assert table.available() == 1
    ledger.advance(Clock.COMPUTE, 2)
    assert table.available() == 2


def test_every_reuse_is_a_new_generation():
    table, seen = RowTable(2, 8, Ledger()), set()
    for key in range(20):
        row = table.take(key, ids(key))
        seen.add((row, int(table.generation[row])))
        table.retire(row, 0)
    assert len(seen) == 20


def test_settled_tokens_are_a_copy_of_the_known_ones():
    table = RowTable(2, 8, Ledger())
    row = table.take(1, ids(5, 6, 7))
    settled = table.settled(row)
    assert settled.tolist() == [5, 6, 7]
    table.tokens[row, 3] = 9
    table.length[row] = 4
    assert table.settled(row).tolist() == [5, 6, 7, 9] and settled.tolist() == [5, 6, 7]
    settled[0] = 0
    assert table.tokens[row, 0] == 5
    table.retire(row, 0)
    again = table.take(2, ids(1))
    assert again == row and table.settled(row).tolist() == [1]
