"""Any depth gives the tokens of a direct computation, whatever the adversary does with the streams."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from harness import WaryModel, captures_at_once, check_at_rest, checksum_loop, kernels_for, run, script, sizes

from gapless.device import CpuDevice
from gapless.loop.loop import Loop
from gapless.testing.sim import SimDevice

SEEDS = 96
BATCHES = 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_depth_equals_the_direct_computation(batch, raced, guarded_steps):
    preemptions = captured = 0
    # A race is seen in whatever order the streams moved: there, fewer seeds do.
    seeds = SEEDS // 4 if raced else SEEDS
    # One batch under no_sync, as of the simulator's seeds.
    with guarded_steps.rest() if batch else nullcontext():
        for seed in range(batch, seeds, BATCHES):
            for depth in (1, 2, 4, 8):
                loop = _one(seed, depth)
                preemptions += loop.planner.preemptions
                captured += loop.counters.graph_steps
    assert preemptions, "the pools were meant to be too small"
    assert captured > seeds * 4 // BATCHES, "half of the seeds were meant to replay graphs"


@pytest.mark.parametrize("chain", [2, 4, 8])
def test_every_chain_equals_the_direct_computation(chain, raced):
    preemptions = captured = chained = 0
    seeds = 12 if raced else 24
    for seed in range(chain, chain + seeds):
        loop = _one(seed, 1 + seed % 3, chain)
        preemptions += loop.planner.preemptions
        captured += loop.counters.graph_steps
        chained += loop.counters.chained_steps
    assert preemptions and captured > seeds and chained > 2 * seeds


def _one(seed: int, depth: int, chain: int | None = None) -> Loop:
    shape = sizes(seed)
    jobs = script(seed, shape.max_len)
    device = SimDevice(seed * 8 + depth, maps_host=seed % 4 == 0)
    graphs = captures_at_once(shape) if seed // BATCHES % 2 else {}
    loop = checksum_loop(
        device, shape, depth, WaryModel, by_priority=seed % 3 == 0, prefix_caching=seed % 5 != 0, chain=chain,
        kernels=kernels_for(seed), **graphs
    )  # fmt: skip
    run(loop, jobs)
    for job in jobs:
        job.check(f"seed {seed}, depth {depth}, request {job.request.key}")
    check_at_rest(loop)
    device.close()
    return loop


@pytest.mark.parametrize(("depth", "chain"), [(1, 1), (2, 1), (4, 1), (8, 1), (None, None), (1, 4), (None, 8)])
def test_threads_equal_the_direct_computation(depth, chain):
    captured = 0
    for seed in range(5):
        shape = sizes(seed)
        jobs = script(seed, shape.max_len)
        device = CpuDevice(threads=1)
        # The null rows that fill a bucket are looked at on the simulator: here a replay has no Python behind it.
        loop = checksum_loop(device, shape, depth, chain=chain, **({} if seed % 2 else captures_at_once(shape)))
        run(loop, jobs)
        assert [job.tokens for job in jobs if job.flag != -1] == [job.expected() for job in jobs if job.flag != -1]
        check_at_rest(loop)
        captured += loop.counters.graph_steps
        device.close()
    assert captured > 50 or not device.captures
