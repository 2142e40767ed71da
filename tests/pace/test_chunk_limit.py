"""The bound on prompt tokens beside decoding rows: it follows measured times, and a whole engine keeps it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from sharpest import sharpest

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.kernels import native
from gapless.loop.spec import Sizes
from gapless.pace.chunk_limit import LEAST_BOUNDED, LEAST_CHUNK_TOKENS, LONGEST, SOON, STALL, UNNOTICED_NS, ChunkLimit
from gapless.testing.checksum import ChecksumModel, continue_prompt
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice

MS = 1_000_000
VOCAB = 97
PROMPT = 10_000
ROWS = 4


def learnt(rows_ns, token_ns, most_ns=0):
    beside = ChunkLimit(most_ns)
    for number in range(50):
        for rows, tokens in ((ROWS, 300), (0, 600), (ROWS, 150 + number)):
            beside.learn(rows, tokens, int(rows_ns * (0.5 + rows / ROWS / 2) + tokens * token_ns))
        beside.learn(ROWS, 0, rows_ns)
    return beside


@pytest.mark.parametrize(
    ("rows_ns", "token_ns", "waiting", "bound_ns"),
    [
        (30 * MS, MS // 4, 0, STALL * 30 * MS),
        (5 * MS, MS // 20, 0, UNNOTICED_NS),
        (MS // 2, MS // 20, 0, UNNOTICED_NS),
        (30 * MS, MS // 4, SOON * 400, 130 * MS),
        (30 * MS, MS // 4, 10**6, LONGEST * 30 * MS),
    ],
)
def test_a_step_with_chunks_takes_no_longer_than_the_bound(rows_ns, token_ns, waiting, bound_ns):
    tokens = learnt(rows_ns, token_ns).tokens(ROWS, waiting)
    assert tokens > LEAST_CHUNK_TOKENS and rows_ns + tokens * token_ns == pytest.approx(bound_ns, rel=0.03)


@pytest.mark.parametrize("bound_ns", [25 * MS, 60 * MS, 300 * MS])
def test_a_users_bound_has_the_say_however_many_wait(bound_ns):
    tokens = learnt(20 * MS, MS // 10, bound_ns).tokens(ROWS, 10**6)
    assert 0.93 * bound_ns < 20 * MS + tokens * MS // 10 <= bound_ns


def test_more_rows_leave_less_time_for_prompts_where_a_user_bounds_it():
    few, many = (learnt(20 * MS, MS // 10, 100 * MS).tokens(rows, 0) for rows in (0, 2 * ROWS))
    assert few - many == pytest.approx(200, abs=20)


def test_slow_prompts_go_on():
    assert learnt(MS, 100 * MS).tokens(ROWS, 0) == LEAST_CHUNK_TOKENS
    assert learnt(MS, 100 * MS, 50 * MS).tokens(ROWS, 0) == LEAST_BOUNDED


@pytest.mark.parametrize("most_ns", [0, 100 * MS])
def test_a_bound_begins_with_few_tokens_and_learns_from_the_first_chunk(most_ns):
    beside, least = ChunkLimit(most_ns), LEAST_BOUNDED if most_ns else LEAST_CHUNK_TOKENS
    beside.learn(4, 0, MS)
    assert beside.tokens(4, 10**6) == least
    beside.learn(0, 1000, 50 * MS)
    assert beside.tokens(0, 0) == pytest.approx((0.97 * most_ns or UNNOTICED_NS) / MS * 20, rel=0.1)


def test_a_bound_follows_the_times():
    beside = learnt(4 * MS, MS // 20)
    before = beside.tokens(ROWS, 0)
    for number in range(100):
        beside.learn(ROWS, 100 + number, 4 * MS + (100 + number) * MS // 10)
    assert beside.tokens(ROWS, 0) == pytest.approx(before / 2, rel=0.05)


def test_steps_that_are_all_alike_do_not_make_tokens_free():
    beside = ChunkLimit()
    for number in range(200):
        beside.learn(8, 128, 100 * MS + number % 3)
    assert beside.tokens(8, 0) < 1000


def test_a_step_over_a_users_bound_has_a_cause():
    beside = learnt(20 * MS, MS // 10, 30 * MS)
    assert beside.over(ROWS, 80, 30 * MS) is None and beside.over(0, 1000, 120 * MS) is None
    assert beside.over(ROWS, 80, 31 * MS) == "late"
    assert beside.over(ROWS, LEAST_BOUNDED, 31 * MS) == "chunk"
    assert beside.over(ROWS, 0, 31 * MS) == "rows"
    assert beside.over(3 * ROWS, 80, 50 * MS) == "rows"
    assert learnt(20 * MS, MS // 10).over(ROWS, 80, 1000 * MS) is None


class PricedDevice(SimDevice):
    """Its streams take the time that the model asks for, beside the little that the seed decides."""

    asked_ns = 0

    def execute(self, stream):
        before = self.asked_ns
        super().execute(stream)
        stream.now += self.asked_ns - before


class PricedModel(ChecksumModel):
    """A step takes 5 ms, and each token `token_ns` more."""

    def __init__(self, device, token_ns):
        super().__init__(VOCAB, PROMPT + 500)
        self.device, self.token_ns = device, token_ns

    def forward(self, inputs, plan, cache):
        self.device.asked_ns += 5 * MS + sum(plan) * self.token_ns
        return super().forward(inputs, plan, cache)


def request(key, prompt, output):
    tokens = np.random.default_rng(key).integers(0, VOCAB, prompt).astype(np.int32)
    return Request(key, tokens, SamplingParams(temperature=0.0, max_tokens=None), key, (), 0, prompt + output)


def run(depth, token_ns=MS // 4, prompt=PROMPT, **bounds):
    """A long prompt comes beside two rows. Returns the prompt's time, steps with prompt tokens of which rows decode,
    and the loop."""
    device = PricedDevice(depth)
    sizes = Sizes(3, PROMPT + 500, 720, 16, 1024, 8)
    model, kernels = PricedModel(device, token_ns), native.load()
    loop = loop_of(device, model, sizes, depth, buckets=(), kernels=kernels, **bounds)
    loop.capture()
    loop.submit(request(0, 100, 400))
    loop.submit(request(1, 100, 400))
    for _ in range(12):
        loop.turn()
    begin, last = device.clock(), request(2, prompt, 3)
    loop.submit(last)
    tokens, first = [], 0
    while len(tokens) < 3:
        for step in loop.turn().tokens:
            tokens += step.tokens[step.keys == 2].tolist()
            if tokens and not first:
                first = device.clock()
    assert tokens == continue_prompt(last.tokens.tolist(), 3, VOCAB)
    beside = [step for step in loop.records.after(0) if step.chunks and step.decode_rows]
    device.close()
    return first - begin, beside, loop


@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_decoding_rows_wait_no_longer_than_the_bound_while_a_long_prompt_comes(depth):
    """The rows take 5.5 ms, and some of the seed's."""
    bounded, chunks, _ = run(depth, bounds_stalls=True)
    whole, large, _ = run(depth)
    assert max(step.device_ns for step in chunks) < 1.1 * LONGEST * 7 * MS < 100 * MS
    assert max(step.device_ns for step in large) > 250 * MS
    assert bounded < 1.2 * whole
    assert sum(step.chunk_tokens for step in chunks) >= PROMPT


@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_steps_keep_within_max_itl_and_none_is_counted(depth):
    _, chunks, loop = run(depth, max_itl_ns=120 * MS)
    late = [step for step in chunks if step.device_ns > 120 * MS]
    counters = loop.counters
    assert not late and not counters.over_itl_late + counters.over_itl_chunk + counters.over_itl_rows
    assert max(step.chunk_tokens for step in chunks) > 350


@pytest.mark.parametrize(("most_ms", "cause"), [(2, "rows"), (8, "chunk")])
def test_steps_that_cannot_keep_within_max_itl_are_counted_and_the_first_is_warned_of(most_ms, cause, caplog):
    with caplog.at_level(logging.WARNING, "gapless.loop"):
        _, chunks, loop = run(2, prompt=1000, max_itl_ns=most_ms * MS)
    assert [step.chunk_tokens for step in chunks].count(LEAST_BOUNDED) > 50
    assert getattr(loop.counters, f"over_itl_{cause}") > 50
    (warning,) = caplog.records
    assert f"max_itl is {most_ms}" in warning.message


def test_a_prompt_that_is_slow_beyond_measure_ends_all_the_same():
    _, chunks, _ = run(2, token_ns=50 * MS, prompt=1000, bounds_stalls=True)
    assert {step.chunk_tokens for step in chunks[:-1]} == {LEAST_CHUNK_TOKENS} and len(chunks) == 8


def test_without_the_bound_a_step_is_filled():
    _, chunks, _ = run(2, prompt=3000)
    assert chunks[0].chunk_tokens == 1022
