"""The timeline on CUDA: times come from events, and busy and idle are all the time there was."""

from __future__ import annotations

import time

import pytest
from harness import checksum_loop, run, script, sizes

from gapless.device import CudaDevice

pytestmark = pytest.mark.usefixtures("reserved_memory")


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_busy_and_idle_are_all_the_time_there_was(depth):
    device = CudaDevice()
    loop = checksum_loop(device, sizes(1), depth)
    device.drain()
    run(loop, script(1, 48), check=False)
    loop.log.forget()
    begin = time.monotonic_ns()
    for seed in range(3):
        run(loop, script(seed + 2, 48), check=False)
        time.sleep(0.05)
    timeline = loop.account()
    wall = time.monotonic_ns() - begin
    device_ns = timeline.device
    assert device_ns.busy_ns + sum(device_ns.idle_ns.values()) == device_ns.wall_ns
    assert abs(device_ns.wall_ns - wall) < 0.01 * wall
    assert timeline.idle["no_work"] >= 3 * 50_000_000 and device_ns.busy_ns > 0
    for record in loop.records:
        assert record.device_start <= record.device_end <= record.home_at <= record.observed_at
    # Steps write their tokens into host memory themselves; those with log-probabilities alone are copied home.
    assert timeline.host.copy == 0
    device.close()
