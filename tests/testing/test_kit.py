"""The test kit by itself: its public names alone, as a program outside of this repository would use them."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from gapless.base.errors import DeviceError
from gapless.base.records import Flag
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.testing.adversary import MOODS
from gapless.testing.checksum import ChecksumModel, answer, continue_prompt
from gapless.testing.scenario import ABORTED, Scenario, ask, play

VOCAB = 97


def crowd(seed: int):
    """Seven callers for four rows: prefixes in common, a stop id, one who leaves early and one who leaves at once."""
    callers = [ask(key, [5, 6, 7, 8, 9 + key % 2], 6 + key, arrives=key) for key in range(5)]
    stop = continue_prompt([1, 2], 4, VOCAB)[3]
    return [*callers, ask(5, [1, 2], 20, stop_ids=(stop,)), ask(6, [3], 20, 2, 4), ask(7, [4], 20, 3, 0)], seed


@pytest.mark.parametrize("mood", [None, *MOODS])
def test_a_crowd_under_every_mood_gets_the_tokens_of_a_direct_computation(mood):
    callers, seed = crowd(11)
    player = play(Scenario(callers, seed, mood, depth=4))
    *stay, early, at_once = callers
    assert all(one.tokens == answer(one.request, VOCAB) for one in stay)
    assert stay[-1].flag == Flag.STOP and all(one.flag == Flag.LENGTH for one in stay[:-1])
    assert early.flag == at_once.flag == ABORTED
    assert 4 <= len(early.tokens) < 20 and early.tokens == answer(early.request, VOCAB)[: len(early.tokens)]
    assert at_once.tokens == [] and player.loop.counters.prefix_hits > 0


def test_equal_scenarios_run_alike_and_another_seed_runs_differently():
    traces = [list(play(Scenario(*crowd(seed), depth=4)).loop.device.trace) for seed in (1, 1, 2)]
    assert traces[0] == traces[1] != traces[2]


def test_gauges_at_rest_show_that_all_is_free():
    callers, seed = crowd(3)
    gauges = play(Scenario(callers, seed)).gauges()
    (pages,) = gauges.pages
    assert (gauges.waiting, gauges.running, gauges.steps, gauges.free_rows) == (0, 0, 0, 4)
    assert pages.free + pages.cached == 19 and gauges.slots == {"packet": [], "outbox": []}


@pytest.mark.parametrize("table", [PagePool, RowTable])
def test_memory_that_is_given_away_under_a_step_in_flight_is_found(table):
    retire = table.retire
    callers, seed = crowd(0)
    early = patch.object(table, "retire", lambda self, what, last_step: retire(self, what, last_step - 4))
    with early, pytest.raises(AssertionError, match="is in flight, and"):
        play(Scenario(callers, seed, "lazy", depth=4))


def test_a_page_that_is_never_given_back_is_found():
    callers, seed = crowd(0)
    with patch.object(PagePool, "retire", lambda *_: None), pytest.raises(AssertionError, match="page"):
        play(Scenario(callers, seed))


def test_a_model_that_raises_ends_the_run_with_its_error():
    class Breaking(ChecksumModel):
        def forward(self, inputs, plan, cache):
            raise ArithmeticError("on purpose")

    with pytest.raises(DeviceError) as raised:
        play(Scenario([ask(0, [1], 3)]), Breaking())
    assert isinstance(raised.value.__cause__, ArithmeticError)


def test_callers_who_never_end_are_reported():
    player = play(Scenario([ask(0, [1], 3)]))
    player.loop.has_work = lambda: True
    with pytest.raises(AssertionError, match="did not end in 10 turns"):
        player.run(most_turns=10)
