"""The watchdog: looks with a clock of the test's, and a program that really hangs."""

from __future__ import annotations

import io
import sys
import threading

import numpy as np
import pytest

from gapless.base.errors import DeviceError, StalledError
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice
from gapless.loop.build import Sizes, build_loop
from gapless.loop.watchdog import Watchdog, stacks
from gapless.model.checksum import ChecksumModel

SECOND = 10**9


class World:
    """What a watchdog looks at."""

    def __init__(self):
        self.now, self.steps, self.working = 0, 0, True
        self.dog = Watchdog(10, lambda: self.steps, lambda: self.working, pytest.fail, lambda: self.now)

    def look(self, seconds):
        self.now += int(seconds * SECOND)
        return self.dog.look()


def test_progress_and_rest_are_no_stall():
    world = World()
    for _ in range(10):
        world.steps += 1
        assert world.look(9) is None
    world.working = False
    for _ in range(10):
        assert world.look(9) is None
    world.working = True
    assert world.look(9) is None


def test_work_without_progress_is_a_stall_after_the_time():
    world = World()
    assert world.look(10) is None
    assert isinstance(world.look(0.001), StalledError)


def test_one_step_in_time_starts_the_time_anew():
    world = World()
    assert world.look(9) is None
    world.steps += 1
    assert world.look(0.5) is None
    assert world.look(10) is None
    error = world.look(0.001)
    assert isinstance(error, StalledError) and "10 s" in str(error)


class Stuck(ChecksumModel):
    """Hangs in its third forward until released."""

    def __init__(self):
        super().__init__(97, 48)
        self.release = threading.Event()
        self.forwards = 0

    def forward(self, inputs, plan, cache):
        self.forwards += 1
        if self.forwards == 3:
            self.release.wait(60)
        return super().forward(inputs, plan, cache)


def test_a_program_that_hangs_fails_every_wait_and_its_stack_is_shown(monkeypatch):
    shown = io.StringIO()  # like a notebook's, it has no file behind it
    monkeypatch.setattr(sys, "stderr", shown)
    device, model = CpuDevice(threads=1), Stuck()
    loop = build_loop(device, model, Sizes(2, 48, 20, 4, 8, 8), 2)
    dog = Watchdog(0.05, lambda: loop.counters.steps, loop.has_work, device.fail)
    dog.start()
    params = SamplingParams(temperature=0.0, max_tokens=None)
    loop.submit(Request(0, np.array([1, 2], np.int32), params, 0, (), 0, 40))
    with pytest.raises(DeviceError) as caught:
        while True:
            loop.turn()
    assert isinstance(caught.value.__cause__, StalledError)
    model.release.set()
    dog.stop()
    device.close()
    assert "Stuck" in shown.getvalue() or "release.wait" in shown.getvalue()
    assert loop.counters.steps >= 1


def test_stacks_name_the_threads():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="a thread at rest")
    thread.start()
    text = stacks()
    done.set()
    thread.join()
    assert "a thread at rest:" in text and "test_stacks_name_the_threads" in text
