"""Automatic depth: enough steps to hide the host, no more than a waiting request should find in front of it."""

from __future__ import annotations

import pytest

from gapless.base.config import MAX_DEPTH
from gapless.loop.depth import LATENCY_BUDGET_NS, Depth

MS = 1_000_000


def learnt(host_ns, device_ns):
    depth = Depth(None)
    for _ in range(200):
        depth.learn(host_ns, device_ns)
    return depth


@pytest.mark.parametrize("fixed", [1, 2, 8])
def test_a_fixed_depth_stays_whatever_is_measured(fixed):
    depth = Depth(fixed)
    assert depth.most == fixed
    for _ in range(50):
        depth.learn(90 * MS, MS)
    assert depth.now(True) == depth.now(False) == fixed


def test_auto_begins_with_two():
    depth = Depth(None)
    assert (depth.now(False), depth.now(True), depth.most) == (2, 2, MAX_DEPTH)


@pytest.mark.parametrize(
    ("host", "device", "depth"),
    [(MS, 10 * MS, 2), (5 * MS, 2 * MS, 4), (MS, MS // 4, 6), (MS, 10, MAX_DEPTH), (0, 0, 2)],
)
def test_the_queue_covers_the_host_s_time(host, device, depth):
    assert learnt(host, device).now(False) == depth


@pytest.mark.parametrize(("device", "depth"), [(20 * MS, 4), (60 * MS, 2), (LATENCY_BUDGET_NS, 3)])
def test_waiting_requests_bound_the_queued_device_time(device, depth):
    slow_host = learnt(20 * device, device)
    assert slow_host.now(False) == MAX_DEPTH
    assert slow_host.now(True) == depth


def test_one_slow_step_does_not_change_the_depth():
    depth = learnt(MS, 10 * MS)
    depth.learn(30 * MS, 10 * MS)
    assert depth.now(False) == 2
