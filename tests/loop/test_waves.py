"""What chunks beside decoding rows cost and bring, by the planner's plans on machines of several speeds."""

from __future__ import annotations

import random

import pytest
from sharpest import sharpest
from waves import MS, Machine, mixed, plain, play

from gapless.pace.chunk_limit import ChunkLimit

MACHINES = {
    "0.6B, two cores": Machine(55, 2.0, 15, 1.1),
    "0.6B, two faster cores": Machine(25, 2.1, 6, 1.15),
    "0.6B, twelve cores": Machine(11, 0.72, 6, 0.33),
    "0.6B, two cores with slow products": Machine(60, 3, 10, 6.0),
    "tiny": Machine(0.47, 0.031, 1.0, 0.03),
}
LOADS = {"wave": (plain(32), 32), "plain": (plain(192), 32), "mixed": (mixed(192), 32), "few": (mixed(48), 8)}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("machine", sharpest(MACHINES, keep=2))
def test_the_default_costs_at_most_5_percent_of_the_tokens_and_itl_falls(machine, load):
    whole, bounded = play(MACHINES[machine], *LOADS[load]), play(MACHINES[machine], *LOADS[load], ChunkLimit())
    assert bounded.tokens_s >= 0.95 * whole.tokens_s
    assert bounded.itl(99) < whole.itl(99) and max(bounded.itl_ms) < max(whole.itl_ms)


@pytest.mark.parametrize("machine", ["0.6B, two cores", "0.6B, two faster cores", "0.6B, twelve cores"])
def test_the_times_of_a_wave_are_at_most_three_and_a_half_steps_without_prompts(machine):
    times = MACHINES[machine]
    assert play(times, *LOADS["wave"], ChunkLimit()).itl(99) < 3.5 * times.ns(32, 0) / MS


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("machine", "most_ms"),
    [("0.6B, two cores", 250), ("0.6B, twelve cores", 60), ("0.6B, twelve cores", 45), ("tiny", 8)],
)
def test_a_users_bound_holds(machine, most_ms, load):
    played = play(MACHINES[machine], *LOADS[load], ChunkLimit(most_ms * MS))
    over = [ns for _, _, ns in played.beside if ns > most_ms * MS]
    assert len(over) <= 2, "the first steps teach what a row takes"
    assert max(over, default=0) < 1.5 * most_ms * MS


def test_a_users_bound_leaves_room_for_noise():
    draw = random.Random(3)
    beside = ChunkLimit(250 * MS)
    played = play(MACHINES["0.6B, two cores"], *LOADS["mixed"], beside, lambda step: draw.gauss(1, 0.07))
    over = [step for step in played.beside if step[2] > 250 * MS]
    assert len(over) < 0.05 * len(played.beside)
    assert {beside.over(*step) for step in over} <= {"late", "rows"}
