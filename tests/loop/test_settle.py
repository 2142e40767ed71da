"""Lines of a step: what readers get of them, and how the row table takes them in."""

from __future__ import annotations

import numpy as np
import pytest
from grouped_model import GroupedModel
from harness import VOCAB, model_loop, request
from oracle_drafter import Oracle
from sharpest import sharpest

from gapless.base.records import Flag, StepTokens
from gapless.device import CpuDevice
from gapless.loop.settle import Lines, with_failures
from gapless.loop.spec import Sizes
from gapless.memory.ledger import Ledger
from gapless.memory.rows import MOST_UNWRITTEN, RowTable
from gapless.plan.bounds import PUBLISHED_TOKENS
from gapless.plan.planner import PUBLISH_STEPS
from gapless.step.speculation import Speculation
from gapless.testing.checksum import ChecksumModel

LIVE, STOP, ERROR = (int(flag) for flag in (Flag.LIVE, Flag.STOP, Flag.ERROR))


def lines(*of):
    """(row, tokens, flag) each."""
    width = max(len(tokens) for _, tokens, _ in of)
    padded = np.array([[*tokens, *[-1] * (width - len(tokens))] for _, tokens, _ in of], np.int32)
    rows, flags = np.array([row for row, _, _ in of]), np.array([flag for *_, flag in of], np.int32)
    return Lines(rows, padded[:, 0] if width == 1 else padded, flags)


def table_of(*lengths):
    """A table whose rows from 1 on have as many tokens, all 1."""
    table = RowTable(len(lengths), 100, Ledger())
    for key, length in enumerate(lengths):
        table.take(key, np.ones(length, np.int32))
    return table


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (((4, [7], LIVE), (2, [8], STOP)), [(4, 7, LIVE), (2, 8, STOP)]),
        (((2, [8], STOP), (3, [-1], ERROR)), [(2, 8, STOP), (3, -1, ERROR)]),
        (
            ((4, [7, 6, 5], LIVE), (2, [8, 9], STOP), (3, [], ERROR), (5, [1], LIVE)),
            [(4, 7, LIVE), (4, 6, LIVE), (4, 5, LIVE), (2, 8, LIVE), (2, 9, STOP), (3, -1, ERROR), (5, 1, LIVE)],
        ),
    ],
)
def test_readers_get_an_entry_for_each_token(of, expected):
    assert list(StepTokens(1, *lines(*of)).entries()) == expected


@pytest.mark.parametrize("width", [1, 3])
def test_a_row_that_failed_has_no_token_beside_what_is_left(width):
    step = lines((1, [4] * width, LIVE), (3, [7] * width, LIVE), (2, [6], LIVE))
    rows, tokens, flags = with_failures(step, np.array([1, 9]))
    assert rows.tolist() == [3, 2, 1, 9] and flags.tolist() == [LIVE, LIVE, ERROR, ERROR]
    assert tokens.tolist()[:2] == step.tokens.tolist()[1:] and (tokens[2:] == -1).all()


def test_tokens_of_several_steps_are_appended_in_order():
    table, rows = table_of(2, 5, 1), np.array([3, 1, 2])
    for first in (10, 20):
        table.append(rows, np.array([[first, first + 1, first + 2], [first, -2, -1], [first, first + 1, -1]], np.int32))
    assert table.length[1:].tolist() == [4, 9, 7] and table.appended == 12
    assert table.settled(3).tolist() == [1, 10, 11, 12, 20, 21, 22]
    assert table.settled(1).tolist() == [1, 1, 10, 20] and table.settled(2).tolist() == [1] * 5 + [10, 11, 20, 21]


def test_steps_of_one_token_and_of_other_rows_follow_each_other():
    table, rows = table_of(2, 1), np.array([2, 1])
    for step in range(MOST_UNWRITTEN + 3):
        table.append(rows, np.array([step, 100 + step], np.int32)[: len(rows)])
        if step == 5:
            rows = rows[:1]
    assert table.settled(1).tolist() == [1, 1, *range(100, 106)]
    assert table.settled(2).tolist() == [1, *range(MOST_UNWRITTEN + 3)] and table.appended == MOST_UNWRITTEN + 9


def test_the_next_request_on_a_row_gets_none_of_what_came_before():
    table, rows = table_of(2), np.array([1])
    table.append(rows, np.array([7], np.int32))
    table.free.append(1)
    assert table.take(5, np.array([3], np.int32)) == 1
    assert table.settled(1).tolist() == [3]


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize(("depth", "chain"), sharpest([(2, 7), (None, None), (1, 1), (4, 1)], 2))
def test_full_pages_are_published_while_steps_repeat(depth, chain, drafts):
    device, size, length = CpuDevice(threads=1), 4, 800
    speculation = Speculation(drafts, Oracle(VOCAB, drafts, 0.0), 2) if drafts else None
    loop = model_loop(
        ChecksumModel(VOCAB, length), device, Sizes(2, length, 2 * length // size + 1, size, 8, 2), depth,
        chain=chain, buckets=(2,), speculation=speculation,
    )  # fmt: skip
    loop.capture()
    for key in (1, 2):
        loop.submit(request(key, [key] * 3, length - 3))
    unpublished = []
    while loop.has_work():
        loop.turn()
        unpublished += [
            int(loop.rows.length[row.number]) - size * row.published for row in loop.planner.decode.rows.values()
        ]
    device.close()
    assert max(unpublished) <= PUBLISHED_TOKENS + PUBLISH_STEPS * (1 + drafts) + size


@pytest.mark.parametrize(("depth", "chain"), [(1, 1), (4, 1), (None, None)])
def test_pages_of_a_narrow_window_are_published_before_they_are_given_up(depth, chain):
    device, size, length = CpuDevice(threads=1), 4, 200
    shape = Sizes(1, length, length // size + 1, size, 8, 1)
    loop = model_loop(GroupedModel(VOCAB, length), device, shape, depth, chain=chain, buckets=(1,))
    loop.capture()
    loop.submit(request(1, [1] * 3, length - 3))
    while loop.has_work():
        loop.turn()
    device.close()
    assert [len(pool.digest_of) for pool in loop.pools] == [(length - 1) // size] * 2
