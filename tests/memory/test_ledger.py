"""The ledger: at once when the number has passed, else with it, in order, exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.memory.ledger import Clock, Ledger


def step(number):
    return Clock.COMPUTE, number


def test_an_item_whose_last_step_is_over_comes_back_at_once():
    ledger, back = Ledger(), []
    ledger.retire(step(0), back.append, "never used")
    assert back == ["never used"]
    ledger.advance(Clock.COMPUTE, 1)
    ledger.retire(step(1), back.append, "used in step 1")
    assert back == ["never used", "used in step 1"]
    assert list(ledger.pending()) == []


def test_an_item_in_flight_waits_for_its_step_and_no_longer():
    ledger, back = Ledger(), []
    ledger.retire(step(2), back.append, "b")
    ledger.retire(step(3), back.append, "c")
    ledger.retire(step(2), back.append, "d")
    ledger.advance(Clock.COMPUTE, 1)
    assert back == [] and sorted(ledger.pending()) == ["b", "c", "d"]
    ledger.advance(Clock.COMPUTE, 2)
    assert back == ["b", "d"] and list(ledger.pending()) == ["c"]
    ledger.advance(Clock.COMPUTE, 3)
    assert back == ["b", "d", "c"] and list(ledger.pending()) == []


@pytest.mark.parametrize("number", [0, 2, 7])
def test_steps_are_observed_one_by_one(number):
    with pytest.raises(AssertionError, match=f"COMPUTE {number} observed after 0"):
        Ledger().advance(Clock.COMPUTE, number)


def test_an_item_waits_for_its_own_clock():
    ledger, back = Ledger(), []
    ledger.retire((Clock.BULK_OUT, 2), back.append, "stored")
    ledger.retire((Clock.ADAPTERS, 1), back.append, "loaded")
    ledger.advance(Clock.BULK_OUT, 1)
    ledger.advance(Clock.COMPUTE, 1)
    ledger.advance(Clock.BULK_IN, 1)
    assert back == [] and sorted(ledger.pending()) == ["loaded", "stored"]
    ledger.advance(Clock.BULK_OUT, 2)
    ledger.advance(Clock.ADAPTERS, 1)
    assert back == ["stored", "loaded"] and list(ledger.pending()) == []


clocks = st.sampled_from(list(Clock))


@settings(deadline=None, database=None, derandomize=True)
@given(st.lists(st.one_of(clocks, st.tuples(clocks, st.integers(0, 6))), max_size=60))
def test_every_item_comes_back_exactly_once_and_never_early(script):
    """A clock moves on by one; a pair retires an item so far ahead on its clock."""
    ledger, due, back = Ledger(), {}, []
    for item, what in enumerate(script):
        if isinstance(what, Clock):
            ledger.advance(what, ledger.passed[what] + 1)
        else:
            due[item] = what[0], ledger.passed[what[0]] + what[1]
            ledger.retire(due[item], back.append, item)
        over = {i for i, (clock, number) in due.items() if number <= ledger.passed[clock]}
        assert sorted(back) == sorted(over)
        assert sorted(ledger.pending()) == sorted(due.keys() - over)
