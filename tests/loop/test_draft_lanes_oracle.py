"""Rows with drafts and wishes of their own get the tokens and scores of a direct computation, whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from harness import VOCAB, Job, captures_at_once, check_at_rest, kernels_for, run, sizes
from oracle_drafter import drafts_beside_chunks
from scripted_drafter import MOST, Scripted
from test_loop_logprobs import Kept, asking_jobs, check_lines
from test_sampling_oracle import Varied, answers_to, sampling_jobs

from gapless.base.errors import DeviceError
from gapless.loop.build import build_loop
from gapless.step.keys import AdjustKey
from gapless.step.lanes import Lists
from gapless.step.program import Buffers, StepProgram
from gapless.step.speculation import Speculation
from gapless.testing.sim import SimDevice


def sampled(seed: int) -> list[Job]:
    return sampling_jobs(seed, 48)


@cache
def answers_of(seed: int, jobs: Callable[[int], list[Job]]) -> list[list[int]]:
    """Prompts and all tokens after them, of the jobs of a seed."""
    return answers_to(jobs(seed))


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("errs", [0.0, 0.3, 1.0])
def test_rows_that_ask_get_their_own_tokens_from_drafts(depth, errs, raced, guarded_steps):
    accepted = drafted = wishes = 0
    with guarded_steps.rest(), drafts_beside_chunks() as beside:
        for seed in (0, 1, 3, 4, 5) if raced else range(8):
            shape, jobs, answers = sizes(seed), sampled(seed), answers_of(seed, sampled)
            graphs = captures_at_once(shape) if seed % 2 else {}
            device, kernels = SimDevice(seed + depth, maps_host=seed % 3 == 0), kernels_for(seed)
            speculation = Speculation(MOST, Scripted.new(answers, errs), shape.rows)
            loop = build_loop(
                device, Varied(VOCAB, 48), shape, depth, kernels=kernels, speculation=speculation, **graphs
            )
            run(loop, jobs)
            for job, answer in zip(jobs, answers, strict=True):
                wanted = answer[len(job.request.tokens) :]
                wanted = wanted[: len(job.tokens)] if job.flag == -1 else wanted
                assert job.tokens == wanted, f"seed {seed}, depth {depth}, request {job.request.key}"
            check_at_rest(loop)
            wishes += sum(job.request.params.temperature > 0 or job.request.bad_words != () for job in jobs)
            accepted += int(loop.launcher.gate.counts.accepted.sum())
            drafted += loop.launcher.gate.counts.draft_tokens
    assert drafted > 50 and wishes > 5 and beside
    least, most = {0.0: (0.8, 1.0), 0.3: (0.3, 0.8), 1.0: (0.0, 0.05)}[errs]
    assert least * drafted <= accepted <= most * drafted, accepted / drafted


@pytest.mark.parametrize("depth", [1, 4])
def test_every_token_that_drafts_gave_has_its_log_probability(depth, guarded_steps):
    accepted = 0
    with guarded_steps.rest(), drafts_beside_chunks() as beside:
        for seed in (0, 1, 3, 4, 5):
            shape, jobs, answers = sizes(seed), asking_jobs(seed), answers_of(seed, asking_jobs)
            speculation = Speculation(MOST, Scripted.new(answers, 0.2), shape.rows)
            kernels = kernels_for(seed)
            loop = build_loop(
                SimDevice(seed + depth), Varied(VOCAB, 48), shape, depth, kernels=kernels, speculation=speculation
            )
            kept = Kept(loop)
            run(loop, jobs)
            for job in jobs:
                check_lines(job, kept.lines.get(job.request.key, []))
            accepted += int(loop.launcher.gate.counts.accepted.sum())
    assert accepted > 30 and beside


def test_a_request_that_does_not_want_drafts_has_none():
    shape, jobs, answers = sizes(1), sampled(1), answers_of(1, sampled)
    for job in jobs:
        job.request = job.request._replace(params=job.request.params.replace(speculate=False))
    speculation = Speculation(MOST, Scripted.new(answers, 0.0), shape.rows)
    loop = build_loop(SimDevice(1), Varied(VOCAB, 48), shape, 2, speculation=speculation)
    run(loop, jobs)
    assert loop.launcher.gate.counts.draft_tokens == 0
    whole = [job for job in jobs if job.flag != -1]
    assert whole and all([*job.request.tokens.tolist(), *job.tokens] in answers for job in whole)


def first_place_alone(lists: Lists, batch: int, slots: int, places: int) -> Lists:
    """The lists of a step in which each row has its first place again and again."""
    made = at_places(lists, batch, slots, places)
    cut, score, own = (tuple(index % size for index in indices) for indices, size in
                       ((made.cut, batch), (made.score, batch), (made.slots, slots)))  # fmt: skip
    return made._replace(cut=cut, score=score, slots=own)


def first_logits_alone(program: StepProgram, key: AdjustKey, at: Buffers) -> None:
    adjust(program, key._replace(places=1), at)


at_places, adjust = Lists.at_places, StepProgram.adjust


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [(Lists, "at_places", first_place_alone), (StepProgram, "adjust", first_logits_alone)],
)
def test_a_lane_at_one_place_alone_fails_the_oracle(owner, name, replacement, monkeypatch, guarded_steps):
    monkeypatch.setattr(owner, name, replacement)
    with guarded_steps.rest(), pytest.raises((AssertionError, DeviceError)):
        for seed in range(8):
            jobs, answers = sampled(seed), answers_of(seed, sampled)
            speculation = Speculation(MOST, Scripted.new(answers, 0.0), sizes(seed).rows)
            run(build_loop(SimDevice(seed), Varied(VOCAB, 48), sizes(seed), 2, speculation=speculation), jobs)
            for job, answer in zip(jobs, answers, strict=True):
                wanted = answer[len(job.request.tokens) :]
                assert job.tokens == wanted or job.flag == -1
