"""Any depth gives the tokens of a direct computation on the fake accelerator, however late its streams are."""

from __future__ import annotations

import pytest
from fake_accelerator import fake_device
from oracles import ADAPTED, ASKING, GROUPED, HOSTED, MASKED, PLAIN, SAMPLED, SUFFIXES, model_drafts, play, right_drafts

ORACLES = {
    "plain": (PLAIN, (8, 9)),
    "adapters": (ADAPTED, (500, 502)),
    "wishes": (ASKING, (100, 101)),
    "masks": (MASKED, (100, 101)),
    "sampling": (SAMPLED, (4, 3)),
    "page groups": (GROUPED, (0, 1)),
    "host tier": (HOSTED, (8, 4)),
    "suffixes": (SUFFIXES, (5, 13)),
    "right drafts": (right_drafts(0.0, 1.0, 1.0), (9, 14)),
    "erring drafts": (right_drafts(0.3, 0.3, 0.95), (14, 9)),
    "erring draft model": (model_drafts(0.3), (3, 5)),
}
"""Each oracle with seeds that reach what it is for"""
EAGER = ("page groups", "host tier")
"""Oracles whose engines capture nothing on their short way"""
FIRST = ("plain", "masks", "host tier", "erring drafts")
LATER = pytest.mark.seeds
pytestmark = pytest.mark.fake


def cases():
    for name in ORACLES:
        yield pytest.param(name, 4, "lazy", 1, marks=() if name in FIRST else LATER)
        yield pytest.param(name, 4, "seeded", 2, marks=LATER)
        yield from (pytest.param(name, depth, "lazy", 1, marks=LATER) for depth in (1, 2, 8, None) if name in FIRST)


@pytest.mark.parametrize(("name", "depth", "mood", "count"), [*cases()])
def test_tokens_on_the_fake_equal_the_direct_computation(name, depth, mood, count, guarded_steps):
    oracle, seeds = ORACLES[name]
    with guarded_steps.rest():
        counts = play(oracle, seeds[:count], depth, opened=lambda seed: fake_device(seed, mood))
    assert counts["captured"] or name in EAGER, counts
