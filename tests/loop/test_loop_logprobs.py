"""Log-probabilities through the whole loop, at any depth, against a direct computation: every position once, in order,
whatever is batched, cut into chunks, cached or preempted."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from direct import Varied, direct_logits, sampling_jobs
from harness import VOCAB, ask, check_at_rest, run, script, sizes
from sharpest import sharpest

from gapless.base.records import Chunk, Flag, StepPlan
from gapless.device import CpuDevice
from gapless.loop import settle as settling
from gapless.loop.settle import settle
from gapless.loop.spec import Sizes
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.step.logprobs import LogprobLines
from gapless.testing.checksum import ChecksumModel
from gapless.testing.loops import loop_of
from gapless.testing.scenario import deliver
from gapless.testing.sim import SimDevice

DEPTHS = (1, 2, 4, 8)


class Kept:
    """What a loop has said of each request, in order, as plain numbers."""

    def __init__(self, loop):
        self.lines = {}
        turn = loop.turn

        def keeping():
            result = turn()
            for settled in result.tokens:
                if settled.logprobs is not None:
                    for key, *line in zip(*(column.tolist() for column in settled.logprobs), strict=True):
                        self.lines.setdefault(key, []).append(line)
            return result

        loop.turn = keeping


def scored_jobs(seed):
    """The script of a seed, for some seeds with sampling settings; two in three ask for something."""
    rng, jobs = random.Random(seed + 77), script(seed, 48) if seed % 4 else sampling_jobs(seed)
    for job in jobs:
        asks = {"logprobs": rng.choice((None, 0, 3, 20)), "prompt_logprobs": rng.choice((None, None, 0, 1, 5))}
        job.request = job.request._replace(params=job.request.params.replace(**asks))
    return jobs


def direct_line(tokens, position, width):
    """Position, log-probability, rank, most likely ids and their log-probabilities, in float64."""
    logits = direct_logits(tokens[:position])
    order = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
    total = math.log(np.exp(logits - logits.max()).sum()) + logits.max()
    target, top = tokens[position], order[:width]
    return [position, logits[target] - total, order.index(target) + 1, top, [logits[token] - total for token in top]]


def check_lines(job, lines):
    """Every position that the job asked for and has seen, once and in order, with the right numbers."""
    params, prompt = job.request.params, job.request.tokens.tolist()
    tokens = prompt + job.tokens
    wanted = list(range(1, len(prompt))) if params.prompt_logprobs is not None else []
    if params.logprobs is not None:
        wanted += range(len(prompt), len(tokens))
    found = [position for position, *_ in lines]
    assert found == (wanted[: len(found)] if job.flag == -1 else wanted), f"request {job.request.key}"
    for line in lines:
        width = len(line[3])
        assert width >= ((params.prompt_logprobs if line[0] < len(prompt) else params.logprobs) or 0)
        position, logprob, rank, ids, tops = direct_line(tokens, line[0], width)
        assert (line[0], line[2], line[3]) == (position, rank, ids)
        assert [line[1], *line[4]] == pytest.approx([logprob, *tops], abs=2e-6)


@pytest.mark.parametrize("seed", sharpest((1, 0, 3)))
def test_every_position_has_its_log_probability_once_at_any_depth(seed):
    reference = None
    for depth in DEPTHS:
        jobs = scored_jobs(seed)
        device = SimDevice(seed + depth, maps_host=seed % 2 == 0)
        loop = loop_of(device, Varied(VOCAB, 48), sizes(seed), depth, prefix_caching=seed % 4 != 3)
        kept = Kept(loop)
        run(loop, jobs)
        check_at_rest(loop)
        if reference is None:
            for job in jobs:
                check_lines(job, kept.lines.get(job.request.key, []))
        # An aborted request has seen more or less of its answer; of the others every bit is the same.
        ended = {job.request.key: narrow(job, kept.lines.get(job.request.key, [])) for job in jobs if job.flag != -1}
        reference = reference or ended
        assert ended == reference, f"depth {depth}"


def narrow(job, lines):
    """A line is as wide as its step's widest; a caller takes as much as it asked for."""
    params, prompt = job.request.params, len(job.request.tokens)

    def cut(position, logprob, rank, ids, tops):
        width = (params.prompt_logprobs if position < prompt else params.logprobs) or 0
        return position, logprob, rank, ids[:width], tops[:width]

    return [cut(*line) for line in lines]


def test_scores_on_threads_are_those_of_the_simulator():
    jobs, device = scored_jobs(3), CpuDevice(threads=1)
    loop = loop_of(device, Varied(VOCAB, 48), sizes(3), None)
    kept = Kept(loop)
    run(loop, jobs)
    for job in jobs:
        check_lines(job, kept.lines.get(job.request.key, []))
    device.close()


def test_tokens_do_not_depend_on_who_asks():
    for depth in (1, 4):
        plain, asking = sampling_jobs(0), scored_jobs(0)
        for jobs in (plain, asking):
            run(loop_of(SimDevice(depth), Varied(VOCAB, 48), sizes(0), depth), jobs)
        assert [job.tokens for job in plain if job.flag != -1] == [job.tokens for job in asking if job.flag != -1]


# Preemption, the prefix index.

SHAPE = Sizes(rows=4, max_len=48, pages=49, page_size=4, step_tokens=8, queue=16)


def asks(key, prompt, new=4, arrives=0, priority=0, **fields):
    return ask(key, prompt, arrives, new, priority=priority, **{"prompt_logprobs": 1, "logprobs": 1, **fields})


def finish(loop, *jobs):
    """The lines of these jobs, checked."""
    kept = Kept(loop)
    run(loop, list(jobs))
    for job in jobs:
        check_lines(job, kept.lines.get(job.request.key, []))
    return kept.lines


def preempting(depth, monkeypatch=None):
    """A long prompt that is preempted while it runs, for the sake of an older request that grows."""
    shape = Sizes(rows=2, max_len=40, pages=12, page_size=4, step_tokens=3, queue=8)
    loop = loop_of(SimDevice(depth), Varied(VOCAB, 48), shape, depth)
    old = asks(0, range(2), new=38, prompt_logprobs=None)
    young = asks(1, range(30, 58), new=4, arrives=6)
    return loop, old, young


@pytest.mark.parametrize("depth", sharpest([4, 1, 2, 8]))
def test_a_prompt_that_is_preempted_half_way_is_scored_once(depth, monkeypatch):
    loop, old, young = preempting(depth)
    seen = []
    claim = loop.planner.claim

    def claiming(row, match):
        if row.key == 1 and row.number:
            seen.append((row.scored, row.asked.to_score))
        return claim(row, match)

    monkeypatch.setattr(loop.planner, "claim", claiming)
    finish(loop, old, young)
    assert loop.planner.preemptions and any(0 < scored < total for scored, total in seen), seen


def test_without_the_rule_against_repeats_positions_come_twice(monkeypatch):
    def forgetting(lines, plan, table, score):
        return settle(lines, plan, table, lambda chunk: 0)

    monkeypatch.setattr(settling, "settle", forgetting)
    loop, old, young = preempting(2)
    with pytest.raises(AssertionError, match="request 1"):
        finish(loop, old, young)


def test_a_scored_prompt_takes_nothing_from_the_prefix_index_and_gives_to_it():
    loop = loop_of(SimDevice(1), Varied(VOCAB, 48), SHAPE, 4)
    prompt = list(range(14))
    first = finish(loop, asks(0, prompt, prompt_logprobs=None))
    assert loop.counters.prefix_hits == 0
    again = finish(loop, asks(1, prompt))
    assert loop.counters.prefix_hits == 0, "what is cached has no logits"
    assert again[1][-4:] == first[0]
    finish(loop, asks(2, prompt, prompt_logprobs=None))
    assert loop.counters.prefix_hits == 12
    fresh = list(range(50, 64))
    finish(loop, asks(3, fresh))
    finish(loop, asks(4, fresh, prompt_logprobs=None))
    assert loop.counters.prefix_hits == 24, "pages of a scored prompt are published as any"


def test_once_its_prompt_is_scored_a_preempted_request_may_use_the_index_again():
    shape = Sizes(rows=2, max_len=40, pages=12, page_size=4, step_tokens=8, queue=8)
    loop = loop_of(SimDevice(3), Varied(VOCAB, 48), shape, 2)
    old, young = asks(0, range(2), new=38, prompt_logprobs=None), asks(1, range(30, 46), new=20)
    finish(loop, old, young)
    assert loop.planner.preemptions and loop.counters.prefix_hits


# What is not finite, what came too late, and what nobody asked for.


class PoorPrompt(Varied):
    """NaN at the places of one token, and nowhere behind it: its KV is good."""

    def __init__(self):
        super().__init__(VOCAB, 48)
        self.bad = None

    def forward(self, inputs, plan, cache):
        self.bad = (inputs.ids == 90)[:, None]
        hidden = super().forward(inputs, plan, cache)
        return torch.where(self.bad, -1, hidden)

    def logits(self, hidden):
        return torch.where(hidden < 0, torch.nan, super().logits(hidden))


@pytest.mark.parametrize("depth", sharpest([4, 1]))
@pytest.mark.parametrize("place", (0, 5, 12))
def test_a_prompt_with_logits_that_are_not_finite_fails_and_says_nothing(depth, place):
    loop = loop_of(SimDevice(depth), PoorPrompt(), SHAPE, depth)
    prompt = [*range(14)]
    prompt[place] = 90
    bad, good, unaware = asks(1, prompt), asks(2, range(40, 52)), asks(3, prompt, prompt_logprobs=None)
    kept = Kept(loop)
    run(loop, [bad, good, unaware])
    assert (bad.flag, bad.tokens) == (Flag.ERROR, [])
    assert all(math.isfinite(line[1]) and line[0] <= place for line in kept.lines.get(1, []))
    check_lines(good, kept.lines[2])
    check_lines(unaware, kept.lines[3])
    assert unaware.flag == Flag.LENGTH, "who does not ask does not look there"
    check_at_rest(loop)
    again = asks(4, prompt, prompt_logprobs=None)
    assert finish(loop, again)[4] == kept.lines[3]


def test_lines_of_an_aborted_request_are_nobodys():
    loop = loop_of(SimDevice(6, mood="lazy"), Varied(VOCAB, 48), SHAPE, 8)
    first, second = asks(0, range(14), new=20), asks(1, range(20, 34), new=20)
    kept = Kept(loop)
    loop.submit(first.request)
    while loop.in_flight < 3:
        loop.turn()
    loop.abort(0)
    before = len(kept.lines.get(0, []))
    loop.submit(second.request)
    by_key = {1: second}
    while loop.has_work():
        for settled in loop.turn().tokens:
            deliver(settled, by_key)
    assert len(kept.lines.get(0, [])) == before and set(kept.lines) <= {0, 1}
    check_lines(second, kept.lines[1])


def test_a_line_counts_for_its_row_generation_and_owner_alone():
    """Left out: a line of an earlier owner, one of a row that was left, one without a token, and one repeated."""
    table = RowTable(3, 16, Ledger())
    rows = [table.take(key, np.arange(8, dtype=np.int32)) for key in (7, 8, 9)]
    table.generation[rows[0]] = 5
    table.retire(rows[1], 0)
    column = np.array([rows[0], rows[0], rows[1], rows[0], rows[2], rows[2]], np.int32)
    generations, positions = np.array([5, 4, 1, 5, 1, 1], np.int32), np.array([8, 8, 3, -1, 2, 3], np.int32)
    numbers = np.arange(6, dtype=np.float32)
    lines = LogprobLines(column, generations, positions, -numbers, positions, column[:, None], numbers[:, None])
    plan = StepPlan(1, (), (Chunk(rows[2], 0, 4, False),), (), (), 0)
    settled, failed = settle(lines, plan, table, lambda chunk: 2 * (chunk.row == rows[2]))
    assert (settled.keys.tolist(), settled.positions.tolist(), settled.logprobs.tolist()) == ([7, 9], [8, 3], [0, -5])
    assert not len(failed)


def test_a_step_without_anybody_who_asks_carries_nothing():
    loop = loop_of(SimDevice(2), ChecksumModel(VOCAB, 48), SHAPE, 2)
    kept = Kept(loop)
    words = []
    bring = loop.launcher.executor.download_lines
    loop.launcher.executor.download_lines = lambda *args: (words.append(args[1:3]), bring(*args))[1]
    run(loop, [asks(0, range(6), prompt_logprobs=None, logprobs=None)])
    assert not kept.lines and set(words) == {(0, 8)}, "a header and one line of four words each"
