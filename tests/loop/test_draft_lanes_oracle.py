"""Rows with drafts and wishes of their own: their scores, and the lanes of every place."""

from __future__ import annotations

from typing import Any

import pytest
from direct import sampling_jobs
from oracles import play, scripted_drafts, scripted_loop
from test_loop_logprobs import Kept, check_lines, scored_jobs

from gapless.base.errors import DeviceError
from gapless.step import lane
from gapless.step.lane import spread
from gapless.step.lanes.adjust import AdjustKey


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.seeds), 4])
def test_every_token_that_drafts_gave_has_its_log_probability(depth, guarded_steps):
    kept = []

    def keeping(*args, **options):
        loop = scripted_loop(*args, errs=0.2, **options)
        kept.append((args[1], Kept(loop)))
        return loop

    oracle = scripted_drafts(0.2, 0, 1)._replace(jobs=scored_jobs, loop=keeping)
    with guarded_steps.rest():
        counts = play(oracle, (0, 1, 3, 4, 5), depth)
    for jobs, scores in kept:
        for job in jobs:
            check_lines(job, scores.lines.get(job.request.key, []))
    assert counts["accepted"] > 30 and counts["beside"]


def test_a_request_that_does_not_want_drafts_has_none():
    jobs = sampling_jobs(1)
    for job in jobs:
        job.request = job.request._replace(params=job.request.params.replace(speculate=False))
    oracle = scripted_drafts(0.0, 0, 1)._replace(jobs=lambda seed: jobs)
    assert play(oracle, [1], 2)["drafted"] == 0 and any(job.flag != -1 for job in jobs)


def first_place_alone(index: tuple[int, ...], batch: int, places: int) -> tuple[int, ...]:
    """A list in which each row has its first place again and again."""
    return tuple([one % batch for one in spread(index, batch, places)])


def first_logits_alone(key: AdjustKey, *given: Any) -> None:
    adjust(key._replace(places=1), *given)


adjust = AdjustKey.run


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (lane, "spread", first_place_alone),
        (AdjustKey, "run", first_logits_alone),
    ],
)
def test_a_lane_at_one_place_alone_fails_the_oracle(owner, name, replacement, monkeypatch, guarded_steps):
    monkeypatch.setattr(owner, name, replacement)
    with guarded_steps.rest(), pytest.raises((AssertionError, DeviceError)):
        play(scripted_drafts(0.0, 0, 1), range(8), 2)
