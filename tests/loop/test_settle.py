"""Lines of a step as one entry a token, and how the loop takes them in."""

from __future__ import annotations

import numpy as np
import pytest
from harness import checksum_loop

from gapless.base.records import Flag
from gapless.loop.build import Sizes
from gapless.loop.settle import one_by_one, with_failures
from gapless.testing.sim import SimDevice

LIVE, STOP, ERROR, HELD = (int(flag) for flag in (Flag.LIVE, Flag.STOP, Flag.ERROR, Flag.HELD))


def lines(*of):
    """(row, tokens, flag) each."""
    width = max(len(tokens) for _, tokens, _ in of)
    padded = [[*tokens, *[-1] * (width - len(tokens))] for _, tokens, _ in of]
    return [np.array(column, np.int32) for column in ([row for row, _, _ in of], padded, [flag for *_, flag in of])]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (((4, [7], LIVE), (2, [8], STOP)), [(4, 7, LIVE), (2, 8, STOP)]),
        (((4, [-1], HELD), (2, [8], STOP), (3, [-1], ERROR)), [(2, 8, STOP), (3, -1, ERROR)]),
        (
            ((4, [7, 6, 5], LIVE), (1, [], HELD), (2, [8, 9], STOP), (3, [], ERROR), (5, [1], LIVE)),
            [(4, 7, LIVE), (4, 6, LIVE), (4, 5, LIVE), (2, 8, LIVE), (2, 9, STOP), (3, -1, ERROR), (5, 1, LIVE)],
        ),
        (((1, [-1, -1], HELD),), []),
    ],
)
def test_lines_become_one_entry_a_token(of, expected):
    entries = one_by_one(*lines(*of), some_flag=any(flag != LIVE for *_, flag in of))
    assert list(zip(*(column.tolist() for column in entries[:3]), strict=True)) == expected
    rows = entries.rows.tolist()
    places = [rows[:index].count(row) for index, row in enumerate(rows)]
    assert places == (entries.places.tolist() if entries.places is not None else [0] * len(rows))


def test_what_is_left_beside_a_failed_row_is_appended_in_its_places():
    loop = checksum_loop(SimDevice(0), Sizes(4, 16, 20, 4, 8, 8), 1)
    table = loop.rows
    table.length[[1, 2, 3]] = 2, 5, 1
    entries = one_by_one(*lines((1, [4, 5], LIVE), (3, [7, 8, 9], LIVE), (2, [6], LIVE)), some_flag=False)
    rows, tokens, flags, places = with_failures(entries, np.array([1], np.int32))
    assert list(zip(rows.tolist(), tokens.tolist(), flags.tolist(), strict=True))[-1] == (1, -1, ERROR)
    table.append(rows[:-1], tokens[:-1], places[:-1])
    assert table.length[[1, 2, 3]].tolist() == [2, 6, 4]
    assert table.tokens[3, 1:4].tolist() == [7, 8, 9] and table.tokens[2, 5] == 6


def test_several_tokens_of_a_row_are_appended_in_order():
    loop = checksum_loop(SimDevice(0), Sizes(4, 16, 20, 4, 8, 8), 1)
    table = loop.rows
    table.length[[1, 2, 3]] = 2, 5, 1
    columns = [3, 3, 3, 1, 2, 2], [7, 8, 9, 4, 5, 6], [0, 1, 2, 0, 0, 1]
    loop.rows.append(*(np.array(column, np.int32) for column in columns))
    assert table.length[[1, 2, 3]].tolist() == [3, 7, 4]
    assert table.tokens[3, 1:4].tolist() == [7, 8, 9]
    assert (table.tokens[1, 2], table.tokens[2, 5], table.tokens[2, 6]) == (4, 5, 6)
