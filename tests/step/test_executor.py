"""An executor: captures that fail, and the launch queue."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import Job, capture_all, checksum_loop, run, sizes
from step_harness import request

from gapless.testing.checksum import ChecksumModel
from gapless.testing.sim import SimDevice

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
