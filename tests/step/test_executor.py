"""One leader, several executors: the same orders give the same tables and the same outboxes on every device."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from followers import Follower, Followers, compare_with
from harness import VOCAB, Job, capture_all, checksum_loop, run, script, sizes
from sharpest import sharpest
from step_harness import request

from gapless.kernels import native
from gapless.testing.checksum import ChecksumModel
from gapless.testing.sim import SimDevice


def led(seed, depth, chain=None, jobs=None, **options):
    """A run of the jobs, or of a script, that two followers have obeyed, and the jobs."""
    shape, followers = sizes(seed), []
    loop = checksum_loop(SimDevice(seed), shape, depth, chain=chain, ranks=Followers(followers), **options)
    for number in range(2):
        pace = 100 * seed + number
        followers.append(Follower(loop, SimDevice(pace), ChecksumModel(VOCAB, shape.max_len), random.Random(pace)))
    compare_with(loop, followers)
    turn = loop.turn

    def all_turn():
        for number, follower in enumerate(followers):
            if number == 0 or loop.counters.steps % 3 == 0:  # the second lags
                follower.turn()
        return turn()

    loop.turn = all_turn
    jobs = jobs or script(seed, shape.max_len)
    run(loop, jobs)
    return loop, followers, jobs


def check_alike(loop, followers):
    for follower in followers:
        follower.drain()
        follower.check_state(loop)
        assert follower.compared == loop.counters.steps


@pytest.mark.parametrize("depth, chain", sharpest([(2, 4), (1, 1), (4, 1), (8, 1)]))
def test_executors_of_one_leader_hold_the_same(depth, chain):
    graphs = 0
    for seed in range(3):
        loop, followers, jobs = led(seed, depth, chain, patience=2, kernels=native.load() if seed else None)
        for job in jobs:
            assert job.tokens == (job.expected()[: len(job.tokens)] if job.flag == -1 else job.expected())
        check_alike(loop, followers)
        graphs += loop.counters.graph_steps
    assert graphs > 10


def test_lanes_are_obeyed_too():
    asks = ({"logprobs": 3}, {"top_p": 0.8, "temperature": 0.9}, {"prompt_logprobs": 1}, {})
    jobs = [
        Job(request(key=key, tokens=range(2 + key, 8 + key), max_len=20, **{"temperature": 0.0, **asked}), key, None)
        for key, asked in enumerate(asks)
    ]
    loop, followers, _ = led(3, 4, jobs=jobs, patience=2)
    check_alike(loop, followers)


def test_a_follower_that_misses_an_order_is_found():
    """The checks bite."""
    for knows in (True, False):
        loop, (follower, _), _ = led(2, 2, chain=1)
        assert follower.orders, "it has not obeyed all of them yet"
        follower.orders.pop()
        if not knows:
            follower.outboxes.pop()
        with pytest.raises(AssertionError, match="did not run" if knows else "a follower's state"):
            check_alike(loop, [follower])


# A capture that fails.


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory"), KeyError(3)])
def test_a_capture_that_fails_for_any_reason_leaves_the_engine_running(error, caplog):
    class Failing(ChecksumModel):
        capturing = False

        def forward(self, *args):
            if self.capturing:
                raise error
            return super().forward(*args)

    model_of = []
    device = SimDevice(0, "eager")
    plain_capture = device.capture

    def capture(*args):
        model_of[0].capturing = True
        try:
            return plain_capture(*args)
        finally:
            model_of[0].capturing = False

    device.capture = capture
    loop = checksum_loop(device, sizes(1), 2, Failing, patience=2)
    model_of.append(loop.launcher.executor.program.model)
    job = Job(request(tokens=(1, 2, 3), temperature=0.0, max_len=30), 0, None)
    with warnings.catch_warnings(), caplog.at_level("WARNING", "gapless"):
        warnings.simplefilter("error")  # as with python -W error: nothing on the way may raise
        run(loop, [job])
    assert job.tokens == job.expected()
    forwards = [key for key, captured in loop.launcher.graphs.known.items() if not captured]
    assert len(forwards) == loop.counters.captures_refused > 1, "each is tried once, and counted"
    (told,) = [record for record in caplog.records if "runs eagerly" in record.message]
    assert f"cannot be captured: {type(error).__name__}" in told.exc_text, "the first is logged in full"


# The launch queue.


def test_eager_steps_in_flight_are_bounded_by_the_launch_queue():
    device = SimDevice(1, "lazy")
    device.caps = device.caps._replace(launch_queue=150)  # two steps of one layer
    loop = checksum_loop(device, sizes(1), 8, buckets=())
    in_flight = []
    job = Job(request(tokens=(5, 6), temperature=0.0, max_len=40), 0, None)
    launch = loop.launcher.executor.launch
    loop.launcher.executor.launch = lambda *args: (in_flight.append(loop.in_flight + 1), launch(*args))[1]
    run(loop, [job])
    assert max(in_flight) == 2 and loop.counters.declined_queue > 0 and job.tokens == job.expected()


def test_replays_are_not_bounded_by_it():
    device = SimDevice(1, "lazy")
    device.caps = device.caps._replace(launch_queue=150)
    loop = checksum_loop(device, sizes(1), 8)
    capture_all(loop)
    job = Job(request(tokens=(5, 6), temperature=0.0, max_len=40), 0, None)
    most = []
    turn = loop.turn
    loop.turn = lambda: (turn(), most.append(loop.in_flight))[0]
    run(loop, [job])
    assert max(most) > 4 and job.tokens == job.expected()
