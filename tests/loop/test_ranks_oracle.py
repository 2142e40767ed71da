"""Any number of ranks gives the tokens of a direct computation, whatever the adversaries of the world do."""

from __future__ import annotations

import pytest
from loops_under_guard import loops_under_no_race
from oracles import ORACLES, play_on_ranks

from gapless.guard.race_device import DeviceWatch
from gapless.testing.world import Faults

SEEDS, RACED = pytest.mark.seeds, pytest.mark.raced
ALONE = ("adapters", "right draft model", "erring draft model", "wrong draft model")
"""Oracles of what only an engine of one rank has"""
FIRST = ("plain", "host tier", "processors", "erring masked drafts")
LATE = Faults(late=40, ring=3, refused=0.2)


def cases():
    for name in ORACLES:
        if name not in ALONE:
            for number, depth in enumerate((4, 1, 2, 8)):
                first = number == 0 and name in FIRST
                yield pytest.param(name, depth, 2 + number % 2, marks=() if first else SEEDS)


@pytest.mark.parametrize(("name", "depth", "ranks"), [*cases()])
def test_tokens_of_ranks_equal_the_direct_computation(name, depth, ranks, guarded_steps):
    oracle = ORACLES[name]
    with guarded_steps.rest():
        counts = play_on_ranks(oracle, oracle.few, depth, ranks, LATE if depth % 4 == 0 else None)
    assert counts["steps"] > 40, counts


@pytest.mark.parametrize(
    ("name", "chain", "depth"),
    [("plain", 4, 2), *(pytest.param(name, 8, 4, marks=SEEDS) for name in ("masks", "erring masked drafts"))],
)
def test_chains_of_ranks_equal_the_direct_computation(name, chain, depth, guarded_steps):
    with guarded_steps.rest():
        counts = play_on_ranks(ORACLES[name], ORACLES[name].few, depth, 2, LATE, chain=chain)
    assert counts["chained"] > 4, counts


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("plain", 2), *(pytest.param(name, 3, marks=RACED) for name in ("erring masked drafts", "page groups"))],
)
def test_pages_of_all_ranks_are_reused_without_a_race(name, ranks, guarded_steps):
    """The leader alone gives pages back, and asks no other rank: its last sum of a step has come after their reads."""
    with guarded_steps.rest(), loops_under_no_race():
        counts = play_on_ranks(ORACLES[name], ORACLES[name].few[:4], 4, ranks, LATE)
    assert counts["steps"] > 40, counts


def test_pages_of_ranks_have_a_race_if_operations_order_nothing(guarded_steps, monkeypatch):
    """The check above bites: without the edges of operations nobody knows what another rank has read."""
    monkeypatch.setattr(DeviceWatch, "takes", lambda *_: None)
    with guarded_steps.rest(), loops_under_no_race("record") as checker:
        play_on_ranks(ORACLES["plain"], [0], 4, 2)
    assert any("engine 2 kv" in str(race) for race in checker.races), checker.races
