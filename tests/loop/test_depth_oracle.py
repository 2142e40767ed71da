"""Any depth gives the tokens of a direct computation, whatever the adversary does with the streams."""

from __future__ import annotations

import pytest
from harness import WaryModel, check_at_rest, checksum_loop, run, script, sizes

from gapless.device import CpuDevice, SimDevice

SEEDS = 200
BATCHES = 8


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_depth_equals_the_direct_computation(batch):
    preemptions = 0
    for seed in range(batch, SEEDS, BATCHES):
        for depth in (1, 2, 4, 8):
            preemptions += _one(seed, depth)
    assert preemptions, "the pools were meant to be too small"


def _one(seed: int, depth: int) -> int:
    shape = sizes(seed)
    jobs = script(seed, shape.max_len)
    device = SimDevice(seed * 8 + depth, maps_host=seed % 4 == 0)
    loop = checksum_loop(device, shape, depth, WaryModel, by_priority=seed % 3 == 0, prefix_caching=seed % 5 != 0)
    run(loop, jobs)
    for job in jobs:
        expected = job.expected()
        if job.flag == -1:
            expected = expected[: len(job.tokens)]
        assert job.tokens == expected, f"seed {seed}, depth {depth}, request {job.request.key}"
    check_at_rest(loop)
    device.close()
    return loop.planner.preemptions


def test_auto_depth_on_threads_equals_the_direct_computation():
    for seed in range(5):
        shape = sizes(seed)
        jobs = script(seed, shape.max_len)
        device = CpuDevice(threads=1)
        loop = checksum_loop(device, shape, None, WaryModel)
        run(loop, jobs)
        assert [job.tokens for job in jobs if job.flag != -1] == [job.expected() for job in jobs if job.flag != -1]
        check_at_rest(loop)
        device.close()
