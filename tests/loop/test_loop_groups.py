"""A whole engine over a model with two page groups, whose window pages go round while requests run."""

from __future__ import annotations

import pytest
from grouped_model import GroupedModel, continue_grouped
from harness import VOCAB, captures_at_once, check_at_rest, kernels_for, model_loop, run, script, sizes

from gapless.device import CpuDevice
from gapless.testing.sim import SimDevice


def direct(job):
    """All tokens of an undisturbed run."""
    prompt = job.request.tokens.tolist()
    tokens = continue_grouped(prompt, job.request.max_len - len(prompt), VOCAB)
    for index, token in enumerate(tokens):
        if token in job.request.stop_ids:
            return tokens[: index + 1]
    return tokens


def small(seed):
    """Pages of two tokens in a pool that barely holds one longest sequence: those of the window are soon another's."""
    shape = sizes(seed)
    return shape._replace(page_size=2, pages=2 + shape.max_len // 2 + seed % 4)


def play(device, seed, depth, **options):
    shape = small(seed)
    loop = model_loop(GroupedModel(VOCAB, shape.max_len), device, shape, depth, **options)
    jobs = script(seed, shape.max_len)
    try:
        run(loop, jobs, check=False)
        check_at_rest(loop)
    finally:
        device.close()
    for job in jobs:
        want = direct(job)
        assert job.tokens == (want if job.aborts_after is None else want[: len(job.tokens)])
    return loop


@pytest.mark.parametrize("seed", range(24))
def test_tokens_are_those_of_the_direct_computation(seed):
    play(SimDevice(seed), seed, 1 + seed % 4, kernels=kernels_for(seed))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("seed", range(100, 106))
def test_captured_steps_give_the_same(seed, depth):
    """On a real stream, with one bucket that is often filled up with null rows."""
    loop = play(CpuDevice(threads=1), seed, depth, **captures_at_once(small(seed)))
    assert loop.counters.graph_steps > 0
