"""Rows about penalties, which run-ahead broke elsewhere: counts are those of the row's own tokens."""

from __future__ import annotations

import random

import pytest
from direct import Varied, direct_run
from harness import VOCAB, Job, captures_at_once, check_at_rest, run
from scenes import broken, request

from gapless.kernels import adjust, plain
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.step.lanes import Lanes
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

ASKS = {"repetition_penalty": 1.8, "frequency_penalty": 1.0, "presence_penalty": 0.5}


def play(depth: int, chain: int | None = None, pages: int = 90, seed: int = 0) -> Loop:
    """Requests with all penalties and a prompt's beginning in common get the tokens of a direct computation."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(13)]
    jobs = [
        Job(request(key, [*shared, key], 34, **ASKS), arrives=3 * key, aborts_after=None)
        for key in range(6)
    ]  # fmt: skip
    shape = Sizes(4, 48, pages, 4, 32, 32, slots=3)
    loop = build_loop(
        SimDevice(seed, "lazy"), Varied(VOCAB, 48), shape, depth, chain=chain, kernels=plain.KERNELS,
        **captures_at_once(shape),
    )  # fmt: skip
    run(loop, jobs)
    assert [job.tokens for job in jobs] == [direct_run(job.request) for job in jobs]
    check_at_rest(loop)
    return loop


def test_row_024_penalties_count_no_token_that_is_not_there():
    """Placeholders of tokens in flight were counted, or ran an index out of range. Here a count is made on the device,
    from the history up to the row's own length, in each of eight steps in flight and in chains alike."""
    assert play(8).counters.graph_steps and play(4, chain=8).counters.chained_steps

    def one_too_many(index, rows, tables, slots):
        at = listed(index, rows, tables, slots)
        return at._replace(length=at.length + 1)

    listed = adjust.listed_rows
    with broken(adjust, "listed_rows", one_too_many):
        play(8)


@pytest.mark.seeds
def test_row_025_a_penalty_has_its_effect_at_every_depth():
    """With run-ahead the penalty's input was empty, and it did nothing. Here its rows are listed in every step."""
    for depth in (1, 8):
        play(depth)

    def unlisted(self, plan):
        return of(self, plan)._replace(adjust=(), slots=())

    of = Lanes.of
    with broken(Lanes, "of", unlisted):
        play(8)
