"""The ledger: at once when the step is over, else with its step, in order, exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.memory.ledger import Ledger


def test_an_item_whose_last_step_is_over_comes_back_at_once():
    ledger, back = Ledger(), []
    ledger.retire(0, back.append, "never used")
    assert back == ["never used"]
    ledger.advance(1)
    ledger.retire(1, back.append, "used in step 1")
    assert back == ["never used", "used in step 1"]
    assert list(ledger.pending()) == []


def test_an_item_in_flight_waits_for_its_step_and_no_longer():
    ledger, back = Ledger(), []
    ledger.retire(2, back.append, "b")
    ledger.retire(3, back.append, "c")
    ledger.retire(2, back.append, "d")
    ledger.advance(1)
    assert back == [] and sorted(ledger.pending()) == ["b", "c", "d"]
    ledger.advance(2)
    assert back == ["b", "d"] and list(ledger.pending()) == ["c"]
    ledger.advance(3)
    assert back == ["b", "d", "c"] and list(ledger.pending()) == []


@pytest.mark.parametrize("step", [0, 2, 7])
def test_steps_are_observed_one_by_one(step):
    with pytest.raises(AssertionError, match="observed after step 0"):
        Ledger().advance(step)


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=60))
def test_every_item_comes_back_exactly_once_and_never_early(script):
    """None observes the next step; a number retires an item that many steps ahead."""
    ledger, due, back = Ledger(), {}, []
    for item, ahead in enumerate(script):
        if ahead is None:
            ledger.advance(ledger.completed + 1)
        else:
            due[item] = ledger.completed + ahead
            ledger.retire(due[item], back.append, item)
        assert sorted(back) == [i for i in due if due[i] <= ledger.completed]
        assert sorted(ledger.pending()) == [i for i in due if due[i] > ledger.completed]
