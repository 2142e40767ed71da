"""Rows of the class sync: an unwanted wait, an asynchrony that is not there, a wedge that is not noticed."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import patch

import numpy as np
import pytest
from harness import VOCAB, checksum_loop, model_loop, request
from scenes import ManyScores, broken, job, play, tokens
from sharpest import sharpest

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice
from gapless.engine.process_backend import ProcessBackend
from gapless.loop.spec import Sizes
from gapless.pace.depth import Depth
from gapless.step.launcher import Launcher
from gapless.testing.sim import SimDevice, SimFence

SHAPE = Sizes(4, 64, 65, 4, 8, 32)

WORKER = """
from gapless.engine import life, worker
from gapless.testing.worker import build_fake
life.WATCHDOG_GRACE_SECONDS = 0.1
worker.run(build_fake)
"""
FAKE = ("gapless.testing.worker", "100", "3600")


class Ends:
    """A sink that waits for the end of the engine."""

    def __init__(self):
        self.news = asyncio.Queue()
        self.started = self.tokens = self.refused = self.came_up = lambda *given: None

    def broke(self, error, *_):
        self.news.put_nowait(error)


async def test_row_065_a_wedged_engine_is_seen_and_named():
    """The engine was blocked at no tokens a second while its metrics page said 200. Here the engine's process notices
    that one turn of its loop does not come back, says so in its last words, and open requests wait for the next one."""
    spawn = asyncio.create_subprocess_exec

    async def with_little_grace(program, *arguments, **options):
        at = arguments.index(FAKE[0])
        return await spawn(program, "-P", "-c", WORKER, *arguments[at + 1 :], **options)

    sink = Ends()
    with patch.object(asyncio, "create_subprocess_exec", with_little_grace):
        backend = ProcessBackend(EngineConfig(watchdog_seconds=0.2), worker=FAKE)
        await backend.start(sink)
        try:
            assert backend.ready()
            backend.submit(Request(1, np.array([1, 2], np.int32), SamplingParams(), 0, (), 0, 9))
            error = await asyncio.wait_for(sink.news.get(), 30)
            assert "one turn of the loop took more than 0.3 s" in str(error)
            assert not backend.ready() and backend.stats().queue.running == 0
        finally:
            await backend.close()


def test_row_067_a_launch_needs_nothing_of_the_device():
    """The launch waited for an event that was set only when the output was fetched, which waited for the launch. Here
    seven steps are launched while the device does not move at all, and only the eighth turn waits, in observe."""

    def scene():
        device = SimDevice(0, "manual")
        loop = checksum_loop(device, SHAPE, 8)
        jobs = [job(key, tokens(key, 20), 20) for key in range(3)]
        for one in jobs:
            loop.submit(one.request)
        for turn in range(1, 8):
            made = loop.turn()
            assert loop.in_flight == turn and not device.trace and not made.tokens
        loop.turn()
        assert device.trace
        for one in jobs:
            loop.abort(one.request.key)
        play(loop, [])

    scene()

    def with_a_handshake(launcher, plan, requests):
        flight = launch(launcher, plan, requests)
        flight.started.wait()
        return flight

    launch = Launcher.launch
    with broken(Launcher, "launch", with_a_handshake):
        scene()


def test_row_079_tokens_do_not_wait_for_other_streams():
    """Reading tokens waited for the whole device, bulk copies included, and first tokens came late. Here the host waits
    for the fence of one step: with a bulk copy that cannot move, every request still completes."""

    def scene():
        device, peer = SimDevice(0), SimDevice(1, "manual")
        peer.bulk_in.launch(int)
        device.bulk_out.after(peer.bulk_in.record())
        device.bulk_out.launch(int)
        jobs = [job(key, tokens(key, 9), 12) for key in range(6)]
        play(checksum_loop(device, SHAPE, 4), jobs)
        assert not [op for op in device.trace if op[0] == "bulk_out"]

    scene()

    def for_the_whole_device(fence, *bell):
        for stream in fence.device.streams:
            wait(stream.record())
        return wait(fence)

    wait = SimFence.wait
    with broken(SimFence, "wait", for_the_whole_device):
        scene()


def test_row_079_tokens_on_threads_do_not_wait_for_other_streams():
    """The same with real threads: a program holds the bulk stream from before the first step until after the last."""
    device, let_go = CpuDevice(threads=1), threading.Event()
    device.bulk_out.launch(let_go.wait, 60)
    held = device.bulk_out.record()
    play(checksum_loop(device, SHAPE, 4), [job(key, tokens(key, 9), 12) for key in range(6)])
    assert not held.done()
    let_go.set()
    held.wait()
    device.close()


FEATURES = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filters": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "bans": {"min_tokens": 20},
    "stop ids": {"stop_ids": tuple(range(90, 97))},
}


@pytest.mark.parametrize("engine", sharpest([{}, {"prefix_caching": False}, {"by_priority": True}]), ids=str)
@pytest.mark.parametrize("feature", sharpest(FEATURES, 3))
def test_row_080_no_setting_takes_the_asynchrony_away(feature, engine):
    """A setting, a sampling parameter or an executor turned asynchronous scheduling off without a word. Here depth is
    what was asked for with every setting of a request and of the engine, and the step records show it."""

    def scene():
        # Without the patience it would let the device run dry on the way, to capture graphs.
        loop = model_loop(ManyScores(VOCAB, SHAPE.max_len), SimDevice(3, "lazy"), SHAPE, 8, patience=99, **engine)
        options = dict(FEATURES[feature])
        stops = options.pop("stop_ids", ())
        for key in range(5):
            loop.submit(request(key, tokens(key, 9), 40, stops, **options))
        while loop.has_work():
            loop.turn()
        assert max(record.in_flight for record in loop.records) == 8
        deep = sum(record.in_flight == 8 for record in loop.records)
        assert deep > len(loop.records) // 2, f"{deep} of {len(loop.records)} steps were launched onto seven others"

    scene()
    with broken(Depth, "now", lambda depth, waiting: 1):
        scene()


def test_row_080_preemption_does_not_end_the_asynchrony():
    """The same under a pool that is too small: the loop is at full depth again after every preemption."""
    loop = checksum_loop(SimDevice(0, "lazy"), Sizes(3, 48, 17, 4, 8, 32), 8)
    play(loop, [job(key, tokens(key, 5), 40) for key in range(5)])
    assert loop.planner.preemptions > 2
    tail = list(loop.records)[-30:]
    assert max(record.in_flight for record in tail) == 8
