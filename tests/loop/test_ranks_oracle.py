"""Any number of ranks gives the tokens of a direct computation, whatever the adversaries of the world do."""

from __future__ import annotations

import pytest
from oracles import ORACLES, play_on_ranks

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
    assert counts["steps"] > 40 and counts["captured"], counts


@pytest.mark.parametrize(
    ("name", "chain", "depth"),
    [("plain", 4, 2), *(pytest.param(name, 8, 4, marks=SEEDS) for name in ("masks", "erring masked drafts"))],
)
def test_chains_of_ranks_equal_the_direct_computation(name, chain, depth, guarded_steps):
    with guarded_steps.rest():
        counts = play_on_ranks(ORACLES[name], ORACLES[name].few, depth, 2, LATE, chain=chain)
    assert counts["chained"] > 4, counts
