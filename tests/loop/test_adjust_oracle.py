"""Rows with penalties, biases, allowed ids and bad words get the tokens of a direct computation, whatever happens.

All requests ask, more than there are slots for: they wait, are preempted, find prefixes, run in chains, on graphs.
"""

from __future__ import annotations

import random

import pytest
from harness import VOCAB, captures_at_once, check_at_rest, run, script, sizes
from test_sampling_oracle import ASKS, SETTINGS, Varied, bad_words, direct_run

from gapless.base.params import SamplingParams
from gapless.device import CpuDevice, Device, SimDevice
from gapless.kernels import native
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop


def asking_jobs(seed, max_len):
    """The script of a seed, with requests that nearly all ask."""
    rng, jobs = random.Random(seed), script(seed, max_len)
    for job in jobs:
        params = SamplingParams(**rng.choice(SETTINGS), **rng.choice((*ASKS, {})), max_tokens=None)
        words = bad_words(rng, params) if params.bad_words else ()
        job.request = job.request._replace(params=params, bad_words=words)
    return jobs


def play(seed: int, device: Device, depth: int | None, chain: int | None = None) -> Loop:
    shape, jobs = sizes(seed), asking_jobs(seed, 48)
    graphs = captures_at_once(shape) if seed % 3 else {}
    kernels = native.load() if seed % 2 else None
    loop = build_loop(device, Varied(VOCAB, 48), shape, depth, chain=chain, kernels=kernels, **graphs)
    run(loop, jobs)
    for job in jobs:
        tokens = direct_run(job.request)
        assert job.tokens == (tokens[: len(job.tokens)] if job.flag == -1 else tokens), job.request
    check_at_rest(loop)
    return loop


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_rows_that_ask_get_the_tokens_of_a_direct_computation(depth, guarded_steps):
    preempted = cached = captured = 0
    with guarded_steps.rest():
        for seed in range(100, 116):
            loop = play(seed, SimDevice(seed + depth, maps_host=seed % 4 == 0), depth)
            preempted += loop.planner.preemptions
            cached += loop.counters.prefix_hits
            captured += loop.counters.graph_steps
    assert preempted and cached and captured


@pytest.mark.parametrize("chain", [2, 8])
def test_rows_that_ask_run_in_chains(chain, guarded_steps):
    with guarded_steps.rest():
        chained = sum(play(seed, SimDevice(seed), 4, chain).counters.chained_steps for seed in range(200, 208))
    assert chained > 20


@pytest.mark.parametrize("depth", [1, 4, None])
def test_rows_that_ask_on_threads(depth):
    for seed in range(300, 303):
        device = CpuDevice(threads=1)
        play(seed, device, depth)
        device.close()


def test_a_step_with_rows_that_ask_reads_nothing_on_the_host(guarded_steps):
    for seed in (400, 401):
        play(seed, SimDevice(seed), 4)
