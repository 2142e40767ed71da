"""Any depth gives the tokens of a direct computation, whatever the adversary does, for every oracle."""

from __future__ import annotations

from functools import partial

import pytest
from loops_under_guard import loops_under_no_race
from oracles import MASKED, NATIVE, ORACLES, PLAIN, masked_drafts, plain_loop, play
from sharpest import sharpest

from gapless.base.errors import DeviceError
from gapless.base.records import Cause
from gapless.kernels import plain
from gapless.kernels.layout import HEADER_WORDS
from gapless.step.packet import Packer
from gapless.testing.sim import SimDevice

DEPTHS = (1, 2, 4, 8)
SEEDS, RACED = pytest.mark.seeds, pytest.mark.raced
RACED_FIRST = ("plain", "host tier", "erring masked drafts", "erring draft model")


def cases():
    """Every oracle at every depth: in `make test` its few seeds at depth 4, and some once more under no_race."""
    for name, oracle in ORACLES.items():
        for depth in DEPTHS:
            first = oracle.sharp and (depth == 4 or (depth, name) == (1, "plain"))
            yield pytest.param(name, depth, "few", marks=() if first else SEEDS)
            yield pytest.param(name, depth, "all", marks=SEEDS)
            again = first and name in RACED_FIRST
            yield pytest.param(name, depth, "raced", marks=() if again and depth == 4 else RACED)


@pytest.mark.parametrize(("name", "depth", "way"), [*cases()])
def test_tokens_equal_the_direct_computation(name, depth, way, guarded_steps):
    oracle = ORACLES[name]
    if way == "raced":
        with guarded_steps.rest(), loops_under_no_race():
            play(oracle, oracle.few, depth)
        return
    seeds = oracle.few if way == "few" else oracle.seeds
    # What the host asks of the device does not depend on the seed.
    counts = play(oracle, seeds, depth, guarded=guarded_steps)
    if depth == 4 or way == "all":  # at other depths the few may not reach everything
        assert all(counts[count] for count in oracle.reaches) and oracle.holds(counts), counts


def chains():
    for name, oracle in ORACLES.items():
        for chain, depth in oracle.chains:
            first = chain == 8 and name in ("plain", "masks", "erring masked drafts")
            yield pytest.param(name, chain, depth, marks=() if first else SEEDS)


@pytest.mark.parametrize(("name", "chain", "depth"), [*chains()])
def test_chains_equal_the_direct_computation(name, chain, depth, guarded_steps):
    seeds = ORACLES[name].seeds[:8]
    with guarded_steps.rest():
        counts = play(ORACLES[name], seeds, depth, chain=chain)
    assert counts["chained"] > len(seeds), counts


def threads():
    for name, oracle in ORACLES.items():
        for depth, chain in oracle.threads:
            yield pytest.param(name, depth, chain, marks=() if depth == 4 and name in RACED_FIRST else SEEDS)


@pytest.mark.parametrize(("name", "depth", "chain"), [*threads()])
def test_threads_equal_the_direct_computation(name, depth, chain, guarded_steps):
    with guarded_steps.rest():
        play(ORACLES[name], ORACLES[name].few[:4], depth, threads=True, chain=chain)


@pytest.mark.parametrize(
    "mood", ["lazy", *(pytest.param(m, marks=SEEDS) for m in ("eager", "starve", "bursts", "single"))]
)
@pytest.mark.parametrize("oracle", sharpest([masked_drafts(0.3), MASKED], whole=True), ids=["drafts", "plain"])
def test_masks_come_as_late_as_the_adversary_likes(oracle, mood, guarded_steps):
    with guarded_steps.rest():
        counts = play(oracle, range(400, 404), 4, mood=mood)
    assert counts["written"] and (counts["held"] or mood != "lazy"), counts


def test_a_step_whose_rows_are_all_held_is_idle_time_of_grammar(guarded_steps):
    with guarded_steps.rest():
        timelines = [MASKED.play(seed, SimDevice(seed, "lazy"), 4).account() for seed in range(400, 402)]
    assert sum(timeline.idle[Cause.GRAMMAR] for timeline in timelines)
    for timeline in timelines:
        assert timeline.busy + sum(timeline.idle.values()) == timeline.covered - timeline.start


@pytest.mark.parametrize("polls", [True, False])
@pytest.mark.parametrize(
    ("depth", "chain"), [(4, 8), *(pytest.param(*how, marks=SEEDS) for how in ((1, None), (None, None)))]
)
@pytest.mark.parametrize("oracle", [NATIVE, masked_drafts(0.3, natives=True)], ids=["plain", "drafts"])
def test_threads_that_make_masks_give_the_direct_tokens(oracle, depth, chain, polls, guarded_steps):
    """Some matchers are native, beside others; threads look for tokens, or are rung."""
    with guarded_steps.rest():
        counts = play(oracle, range(300, 304), depth, threads=True, chain=chain, mask_polls=polls)
    assert counts["written"] > 5, counts


@pytest.mark.unguarded
def test_a_bucket_filled_up_with_a_row_that_runs_is_noticed(monkeypatch):
    write = Packer.write

    def no_null_rows(packer, plan, shape, requests, words, *rest):
        write(packer, plan, shape, requests, words, *rest)
        if not shape.chunks:
            rows = words[HEADER_WORDS : HEADER_WORDS + shape.rows]
            rows[len(plan.decode) :] = rows[0]

    monkeypatch.setattr(Packer, "write", no_null_rows)
    with pytest.raises(DeviceError, match="two tokens in one slot"):
        play(PLAIN._replace(loop=partial(plain_loop, kernels=plain.KERNELS)), range(8, 16), 4)
