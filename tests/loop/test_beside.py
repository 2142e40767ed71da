"""The bound on prompt tokens beside decoding rows: it follows measured times, and a whole engine keeps it."""

from __future__ import annotations

import numpy as np
import pytest

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.kernels import native
from gapless.loop.beside import LEAST_TOKENS, STALL, UNNOTICED_NS, Beside
from gapless.loop.build import Sizes, build_loop
from gapless.testing.checksum import ChecksumModel, continue_prompt
from gapless.testing.sim import SimDevice

MS = 1_000_000
VOCAB = 97
PROMPT = 10_000


def learnt(step_ns, token_ns):
    beside = Beside()
    for _ in range(50):
        beside.learn(4, 0, step_ns)
        beside.learn(4, 300, step_ns + 300 * token_ns)
        beside.learn(0, 600, 600 * token_ns)
    return beside


@pytest.mark.parametrize(
    ("step_ns", "token_ns", "bound_ns"),
    [
        (30 * MS, MS // 2, STALL * 30 * MS),
        (5 * MS, MS // 4, UNNOTICED_NS),
        (MS // 2, MS // 20, UNNOTICED_NS),
    ],
)
def test_a_step_with_chunks_takes_no_longer_than_the_bound(step_ns, token_ns, bound_ns):
    tokens = learnt(step_ns, token_ns).tokens
    assert tokens > LEAST_TOKENS and bound_ns - 2 * token_ns < step_ns + tokens * token_ns <= bound_ns


def test_slow_prompts_go_on():
    assert learnt(MS, 100 * MS).tokens == LEAST_TOKENS


def test_it_begins_with_few_and_learns_from_the_first_chunk_that_is_large_enough():
    beside = Beside()
    assert beside.tokens == LEAST_TOKENS
    beside.learn(4, 0, MS)
    beside.learn(4, LEAST_TOKENS - 1, 500 * MS)
    assert beside.tokens == LEAST_TOKENS
    beside.learn(4, LEAST_TOKENS, MS + LEAST_TOKENS * MS // 10)
    assert beside.tokens == pytest.approx(990, abs=1)


def test_it_follows_the_times():
    beside = learnt(5 * MS, MS // 20)
    before = beside.tokens
    for _ in range(50):
        beside.learn(4, 300, 5 * MS + 300 * MS // 10)
    assert beside.tokens == pytest.approx(before / 2, rel=0.01)


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


def run(bounded, depth, token_ns=MS // 4, prompt=PROMPT):
    """A long prompt comes beside two rows. Returns the prompt's time, steps with prompt tokens of which rows decode,
    and the tokens of the long prompt's request."""
    device = PricedDevice(depth)
    sizes = Sizes(3, PROMPT + 500, 720, 16, 1024, 8)
    model, kernels = PricedModel(device, token_ns), native.load()
    loop = build_loop(device, model, sizes, depth, bounds_stalls=bounded, buckets=(), kernels=kernels)
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
    return first - begin, beside


@pytest.mark.parametrize("depth", [1, 4])
def test_decoding_rows_wait_no_longer_than_the_bound_while_a_long_prompt_comes(depth):
    bounded, chunks = run(True, depth)
    whole, large = run(False, depth)
    # A step has some ms of the seed's beside the price.
    assert max(step.device_ns for step in chunks) < 1.1 * UNNOTICED_NS
    assert max(step.device_ns for step in large) > 2.5 * UNNOTICED_NS
    assert bounded < 1.15 * whole
    assert sum(step.chunk_tokens for step in chunks) >= PROMPT


def test_a_prompt_that_is_slow_beyond_measure_ends_all_the_same():
    _, chunks = run(True, 2, token_ns=50 * MS, prompt=1000)
    assert {step.chunk_tokens for step in chunks[:-1]} == {LEAST_TOKENS} and len(chunks) == 4


def test_without_the_bound_a_step_is_filled():
    _, chunks = run(False, 2, prompt=3000)
    assert chunks[0].chunk_tokens == 1022
