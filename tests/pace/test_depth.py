"""Automatic depth: enough steps to hide the host, no more than a waiting request should find in front of it; and
automatic chains: as long as the host's visits need to be worth it, and no longer."""

from __future__ import annotations

import pytest

from gapless.base.config import MAX_DEPTH
from gapless.pace.depth import LATENCY_BUDGET_NS, MARGIN, MAX_CHAIN, STREAM_BUDGET_NS, Depth

MS = 1_000_000
US = 1_000


def learnt(host_ns, device_ns, step_ns=0, wake_ns=0, chain=None, fixed=None):
    """`host_ns` a visit, and `step_ns` more for each step."""
    depth = Depth(fixed, chain)
    for _ in range(200):
        depth.learn(step_ns, device_ns)
        depth.woke(wake_ns)
        depth.visited(host_ns)
    return depth


@pytest.mark.parametrize("fixed", [1, 2, 8])
def test_a_fixed_depth_stays_whatever_is_measured(fixed):
    depth = learnt(90 * MS, MS, fixed=fixed)
    assert (depth.most, depth.longest) == (fixed, 1)
    assert depth.now(True) == depth.now(False) == fixed
    assert depth.chain == 1


def test_auto_begins_with_two():
    depth = Depth(None)
    assert (depth.now(False), depth.now(True), depth.most) == (2, 2, MAX_DEPTH)
    assert (depth.chain, depth.longest) == (1, MAX_CHAIN)


@pytest.mark.parametrize(
    ("host", "device", "depth"),
    [(MS, 10 * MS, 2), (5 * MS, 2 * MS, 4), (MS, MS // 4, 6), (MS, 10, MAX_DEPTH), (0, 0, 2)],
)
def test_the_queue_covers_the_host_s_time(host, device, depth):
    assert learnt(host, device).now(False) == depth


@pytest.mark.parametrize(("wake", "depth"), [(0, 2), (50, 2), (70, 3), (200, 4)])
def test_the_queue_covers_the_time_of_waking_up(wake, depth):
    assert learnt(40 * US, 120 * US, 10 * US, wake * US).now(False) == depth


def test_the_queue_covers_wake_ups_that_are_later_than_their_mean():
    even, uneven = Depth(None, 1), Depth(None, 1)
    for n in range(200):
        for depth, late in ((even, 50 * US), (uneven, (n % 2) * 100 * US)):
            depth.learn(10 * US, 120 * US)
            depth.woke(late)
            depth.visited(40 * US)
    assert (even.now(False), uneven.now(False)) == (2, 4)


def test_the_queue_covers_the_whole_of_a_visit():
    depth = learnt(50 * US, 120 * US, 40 * US, chain=8)
    assert depth.now(False) == 2 + (50 + 8 * 40) // 120


@pytest.mark.parametrize(("device", "depth"), [(20 * MS, 4), (60 * MS, 2), (LATENCY_BUDGET_NS, 3)])
def test_waiting_requests_bound_the_queued_device_time(device, depth):
    slow_host = learnt(20 * device, device)
    assert slow_host.now(False) == MAX_DEPTH
    assert slow_host.now(True) == depth


def test_one_slow_step_does_not_change_the_depth():
    depth = learnt(MS, 10 * MS)
    depth.learn(30 * MS, 10 * MS)
    depth.visited(30 * MS)
    assert depth.now(False) == 2


@pytest.mark.parametrize(
    ("visit", "step", "device", "chain"),
    [
        (40, 15, 120, 1),  # the host keeps up
        (40, 25, 120, 2),
        (41, 49, 120, 4),
        (40, 58, 120, MAX_CHAIN),  # 20 would be enough
        (40, 200, 120, MAX_CHAIN),  # nothing is enough, and a chain still helps
        (100, 60, 600, 1),
        (500, 60, 600, 3),
        (5000, 60, 600, 3),  # four steps would come out too late
        (5000, 60, 2_500, 1),
        (0, 0, 0, 1),
    ],
)
def test_a_chain_is_as_long_as_the_host_needs_it(visit, step, device, chain):
    depth = learnt(visit * US, device * US, step * US)
    assert depth.chain == chain
    assert chain == 1 or chain * device * US <= STREAM_BUDGET_NS
    if 1 < chain < MAX_CHAIN and visit < 1000:
        for shorter in range(1, chain):
            assert visit + shorter * step > MARGIN * shorter * device


@pytest.mark.parametrize("fixed", [None, 1, 4])
def test_a_chain_that_was_asked_for_stays(fixed):
    depth = learnt(MS, 10 * MS, chain=4, fixed=fixed)
    assert (depth.chain, depth.longest) == (4, 4)


def test_a_step_costs_the_host_its_own_time_and_its_share_of_a_visit():
    depth = learnt(80 * US, 10 * US, step_ns=5 * US)
    assert depth.chain == MAX_CHAIN and depth.host_ns(5 * US) == pytest.approx(15 * US, rel=0.01)
