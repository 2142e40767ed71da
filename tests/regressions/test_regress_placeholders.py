"""Rows of the class placeholder: a stand-in for a token that the host does not know yet leaks or is miscounted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from harness import VOCAB, Job, LookingModel, checksum_loop, model_loop, script, sizes
from scenes import (
    Log,
    broken,
    job,
    play,
    tokens,
)
from sharpest import sharpest

from gapless.base.records import Flag
from gapless.kernels import plain
from gapless.loop.build import Sizes
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.plan.planner import Planner
from gapless.plan.prefill import Prefill
from gapless.step import program
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

SEEDS = range(8)
TIGHT = Sizes(3, 48, 17, 4, 6, 32)
"""Chunks of a few tokens, and a pool in which three long requests do not fit."""


def tight_jobs(count=5):
    return [job(key, tokens(key, 5 + 4 * (key % 3)), 30) for key in range(count)]


def tight(seed, tweak=lambda loop: None, depth=8, jobs=None):
    loop = checksum_loop(SimDevice(seed, maps_host=seed % 2 == 0), TIGHT, depth)
    tweak(loop)
    return play(loop, jobs or tight_jobs())


def test_row_027_no_stand_in_for_a_token_reaches_the_forward():
    """Placeholder ids of -1 of rows that were not scheduled, or came back, reached the embedding. Here there is no
    placeholder: every id, position and slot that a forward sees is real, after skips and preemptions too."""

    class Wary(LookingModel):
        def look(self, inputs, plan, cache):
            for what, least, most in (
                (inputs.ids, 0, VOCAB), (inputs.positions, 0, self.max_model_len), (inputs.pages, 0, cache.pages),
                (inputs.slots, 0, cache.pages * cache.page_size), (inputs.kv_lens, 1, self.max_model_len + 1),
            ):  # fmt: skip
                assert int(what.min()) >= least and int(what.max()) < most

    def scene():
        preemptions = 0
        for seed in SEEDS:
            shape = sizes(seed)
            loop = model_loop(Wary(VOCAB, shape.max_len), SimDevice(seed), shape, 8)
            preemptions += play(loop, script(seed, shape.max_len)).planner.preemptions
        return preemptions

    assert scene() > 0

    def with_a_placeholder(packet, *rest):
        if packet.tokens.shape[0] and not packet.admissions.shape[0]:
            packet.tokens[-1:] = -1
        return build(packet, *rest)

    build = program.mixed_batch
    with broken(program, "mixed_batch", with_a_placeholder):
        scene()


@pytest.mark.seeds
def test_row_029_a_preempted_request_comes_back_with_all_its_tokens():
    """The list of known tokens was cut when chunked prefill met preemption, and wrong tokens followed. Here a request
    goes back to the queue with everything that is settled, its output included, and is computed again in chunks."""

    def scene():
        return [tight(seed) for seed in SEEDS]

    for loop in scene():
        assert loop.planner.preemptions > 0

    def cut(rows, row):
        return settled(rows, row)[:-1]

    settled = RowTable.settled
    with broken(RowTable, "settled", cut):
        scene()


@pytest.mark.parametrize("every", sharpest([3, 1, 7]))
def test_row_031_clearing_the_cache_neither_drops_nor_doubles_a_token(every):
    """A pause with a cleared cache discarded a fixed number of frames instead of those in flight: tokens were lost or
    came twice. Here the prefix index is emptied again and again under steps in flight, and every token comes once."""

    def scene():
        for seed in SEEDS:
            shape = sizes(seed)
            loop = checksum_loop(SimDevice(seed), shape, 8)
            _forget_often(loop, every)
            play(loop, script(seed, shape.max_len))

    scene()

    def with_pages_in_use(pool):
        pool.free.extend(page for page in pool.digest_of if page not in pool.cached)
        forget(pool)

    forget = PagePool.forget
    with broken(PagePool, "forget", with_pages_in_use):
        scene()


def _forget_often(loop, every):
    turn, turns = loop.turn, Counter()

    def with_forget():
        turns["all"] += 1
        if turns["all"] % every == 0:
            loop.pool.forget()
        return turn()

    loop.turn = with_forget


def test_row_032_a_stop_is_seen_in_its_own_step():
    """After discarded frames a stop was noticed one or two steps late. Here the device judges each token as it samples
    it: the stop comes with its token at every depth, the step of each token is known, and nothing follows."""

    def scene():
        for depth in (1, 2, 8):
            loop = checksum_loop(SimDevice(depth, "lazy"), Sizes(4, 48, 49, 4, 8, 8), depth)
            jobs = [job(key, tokens(key, 6), 40) for key in range(4)]
            # Its sixth token stops it; another one is aborted at about the same time.
            jobs = [Job(one.request._replace(stop_ids=(one.expected()[5],)), 0, None) for one in jobs]
            jobs[2].aborts_after = 3
            steps = _steps_of_tokens(loop)
            play(loop, jobs)
            for one in jobs[:2]:
                assert one.flag == Flag.STOP
                seen = steps[one.request.key]
                assert seen == list(range(seen[0], seen[0] + len(one.expected())))

    scene()

    def overlooked(*args):
        given = take(*args)
        return given._replace(flags=torch.where(given.flags == int(Flag.STOP), int(Flag.LIVE), given.flags).int())

    take = plain.take
    with broken(plain, "take", overlooked):
        scene()


def _steps_of_tokens(loop):
    steps, commit = {}, loop.commit

    def noted(flight):
        settled = commit(flight)
        for key in settled.keys.tolist():
            steps.setdefault(key, []).append(settled.step)
        return settled

    loop.commit = noted
    return steps


def test_row_033_chunks_and_many_requests_keep_the_counts():
    """Chunked prefill under concurrency alone, without preemption, drove a counter of placeholders below zero. Here
    the same mixture of chunks and decode rows ends with every request complete and nothing in use."""
    shape = Sizes(12, 64, 200, 4, 13, 64)

    def scene():
        for seed in SEEDS[:4]:
            loop = checksum_loop(SimDevice(seed), shape, 8)
            jobs = [job(key, tokens(key, 3 + key * 7 % 50), 1 + key * 5 % 12, arrives=key // 2) for key in range(30)]
            play(loop, jobs)
            assert loop.planner.preemptions == 0
            assert any(record.decode_rows and record.chunk_tokens for record in loop.records)

    scene()

    def too_soon(prefill):
        return tuple(chunk._replace(last=chunk.last or chunk.size > 1) for chunk in take(prefill))

    take = Prefill.take
    with broken(Prefill, "take", too_soon):
        scene()


def _count_lines(loop, sampled):
    read = loop.launcher.read

    def counted(flight):
        out = read(flight)
        sampled["lines"] += int((out.flags != int(Flag.INERT)).sum())
        sampled["inert"] += int((out.flags == int(Flag.INERT)).sum())
        return out

    loop.launcher.read = counted


def test_row_036_a_known_length_costs_no_extra_step():
    """Without a check of the length every request ran a step too many, and rows went in and out of the batch. Here the
    host plans to the last token and no further: with max_tokens alone no line of any outbox is inert."""

    def scene():
        for depth in (1, 4, 8):
            sampled = Counter()
            loop = checksum_loop(SimDevice(depth), Sizes(4, 48, 49, 4, 16, 32), depth)
            _count_lines(loop, sampled)
            jobs = [job(key, tokens(key, 4 + key), 1 + 3 * key) for key in range(9)]
            log = Log(loop)
            play(loop, jobs)
            assert sampled == {"lines": sum(len(one.tokens) for one in jobs), "inert": 0}
            assert sum(len(plan.decode) for plan in log.plans) == sum(len(one.tokens) - 1 for one in jobs)

    scene()
    with broken(Planner, "leave_at_end", lambda planner: None):
        scene()


def test_row_066_the_next_step_takes_the_token_that_the_last_one_sampled():
    """The next step was submitted before the previous ids were applied, so tokens doubled. Here the device applies its
    own tokens: eight steps are launched before the host sees any, and each runs the next position, once."""

    class Noting(LookingModel):
        def __init__(self):
            super().__init__(VOCAB, 48)
            self.seen = []

        def look(self, inputs, plan, cache):
            self.seen += zip(inputs.positions.tolist(), inputs.ids.tolist(), strict=True)

    def scene(tweak=lambda loop: None):
        model = Noting()
        loop = model_loop(model, SimDevice(0, "manual"), Sizes(1, 48, 13, 4, 8, 8), 8)
        tweak(loop)
        one = job(1, tokens(1, 6), 40)
        loop.submit(one.request)
        for _ in range(7):
            assert not loop.turn().tokens
        assert loop.in_flight == 7 and not model.seen
        while loop.has_work():
            for settled in loop.turn().tokens:
                one.tokens += settled.tokens.tolist()
        assert one.tokens == one.expected()
        assert model.seen == list(enumerate([*tokens(1, 6), *one.tokens[:-1]]))

    scene()

    def not_applied(rows, line, sizes, tokens, flags, state, history):
        place = rows[:1], line[:1, 2].long()
        before = history[place].clone()
        advance(rows, line, sizes, tokens, flags, state, history)
        history[place] = before

    advance = plain.advance
    with broken(plain, "advance", not_applied):
        scene()
