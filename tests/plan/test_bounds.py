"""Bounds of rows that steps may hold, beside rows that get a token in every step."""

from __future__ import annotations

from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.plan.bounds import Bounds

HELD, OTHER = 1, 2


def bounds_in_flight(steps: int, held: bool = True) -> Bounds:
    """Two rows of ten settled tokens, at most 14, after `steps` steps that are not observed yet."""
    table = RowTable(2, 16, Ledger())
    table.length[1:] = 10
    bounds = Bounds(table, page_size=4, least=1, most=1)
    for row, may_be_held in ((HELD, held), (OTHER, False)):
        bounds.begin(row, 3, 0, 14, may_be_held)
        bounds.has_pages(row, 4)
        bounds.enter(row)
    for _ in range(steps):
        bounds.step()
    bounds.look()
    return bounds


def test_a_row_that_may_be_held_counts_on_no_token_of_a_step_in_flight():
    bounds = bounds_in_flight(3)
    assert (bounds.low[HELD], bounds.high[HELD]) == (10, 13)
    assert (bounds.low[OTHER], bounds.high[OTHER]) == (13, 13)


def test_a_row_with_variable_advance_has_not_ended_before_its_tokens_are_settled():
    bounds = bounds_in_flight(6)
    assert bounds.ended() == [OTHER] and bounds.has_ended(OTHER) and not bounds.has_ended(HELD)
    assert bounds.high[HELD] == 14, "no step goes beyond its limit"
    bounds.length[HELD] = 14
    bounds.look()
    assert bounds.ended() == [HELD, OTHER] and bounds.has_ended(HELD)


def test_one_column_serves_both_bounds_while_no_row_may_be_held():
    bounds = bounds_in_flight(2, held=False)
    assert bounds.high is bounds.low
    bounds.leave(HELD)
    bounds.clear(HELD)
    bounds.begin(HELD, 3, 0, 14, True)
    assert bounds.high is not bounds.low and bounds.high[OTHER] == 12
    bounds.clear(HELD)
    assert bounds.high is bounds.low
    bounds.begin(HELD, 3, 0, 14)
    bounds.enter(HELD)
    bounds.step()
    bounds.look()
    assert bounds.low[HELD] == 11, "the row's next owner gets a token in every step"
