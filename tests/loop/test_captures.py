"""Captures while the engine serves: refused ones, a device that fails meanwhile, few buckets."""

from __future__ import annotations

import pytest
from harness import checksum_loop, run, script, sizes

from gapless.base.errors import CaptureError, DeviceError
from gapless.device import SimDevice
from gapless.step.graphs import buckets_up_to

SEED = 17


def loop_over(device, **options):
    return checksum_loop(device, sizes(SEED), 2, patience=1, **options)


def serve(loop):
    jobs = script(SEED, 48)
    run(loop, jobs)
    assert [job.tokens for job in jobs if job.flag != -1] == [job.expected() for job in jobs if job.flag != -1]


def test_a_refused_capture_is_told_once_and_its_steps_run_eagerly():
    device, tried = SimDevice(SEED), []

    def refuse(key, program, buffers):
        tried.append(key)
        raise CaptureError("it waits for the device")

    device.capture = refuse
    loop = loop_over(device)
    with pytest.warns(RuntimeWarning, match=r"run eagerly: it waits for the device"):
        serve(loop)
    assert len(set(tried)) == len(tried) > 0 == len(loop._launcher.graphs)
    assert loop.counters.graph_steps == 0 < loop.counters.graph_misses
    device.close()


def test_a_device_that_fails_before_a_capture_fails_the_turn():
    device = SimDevice(SEED)
    loop = loop_over(device)
    for job in script(SEED, 48):
        loop.submit(job.request)
    while not (loop._launcher.graphs.due and not loop.in_flight):
        loop.turn()
    device.fail(RuntimeError("it fell off the bus"))
    with pytest.raises(DeviceError, match="fell off the bus"):
        loop.turn()
    assert not len(loop._launcher.graphs)


def test_steps_beyond_the_last_bucket_are_no_misses():
    device = SimDevice(SEED)
    loop = loop_over(device, buckets=(1,))
    serve(loop)
    assert {key.decode for key in loop._launcher.graphs._graphs} == {1}
    counters = loop.counters
    assert 0 < counters.graph_steps + counters.graph_misses < counters.steps
    device.close()


def test_the_last_bucket_holds_all_rows():
    assert buckets_up_to(7) == (1, 2, 3, 4, 6, 7) and buckets_up_to(1) == (1,)
