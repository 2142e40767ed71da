"""The watchdog: looks that a test takes for it, and a program that really hangs."""

from __future__ import annotations

import io
import sys
import threading
from contextlib import nullcontext

import pytest
from harness import request

from gapless.base.errors import DeviceError, StalledError
from gapless.device import CpuDevice, CudaDevice
from gapless.loop.spec import Sizes
from gapless.loop.watchdog import Watchdog, patience, stacks
from gapless.memory.pages import Pin
from gapless.testing.checksum import ChecksumModel
from gapless.testing.loops import loop_of


class World:
    """What a watchdog with a limit of 10 s looks at, once a second."""

    def __init__(self):
        self.steps, self.working = 0, True
        self.dog = Watchdog(10, lambda: self.steps, lambda: self.working, pytest.fail)
        assert self.dog.pause == 1

    def looks(self, count):
        """What the last of these looks says."""
        return [self.dog.look() for _ in range(count)][-1]


def test_progress_and_rest_are_no_stall():
    world = World()
    for _ in range(10):
        world.steps += 1
        assert world.looks(9) is None
    world.working = False
    assert world.looks(100) is None
    world.working = True
    assert world.looks(9) is None


def test_work_without_progress_is_a_stall_after_the_time():
    world = World()
    assert world.looks(10) is None
    assert isinstance(world.looks(1), StalledError)


def test_one_step_in_time_starts_the_time_again():
    world = World()
    assert world.looks(9) is None
    world.steps += 1
    assert world.looks(11) is None
    error = world.looks(1)
    assert isinstance(error, StalledError) and "10 s" in str(error)


def test_the_limit_follows_from_what_a_step_may_take():
    billions = 30e9
    step = 2 * 1024 * billions
    cpu, gpu = CpuDevice.caps.operations, CudaDevice.caps.operations
    assert patience(60, step, cpu) == step / cpu > 3000
    assert patience(60, step, gpu) == 60
    assert patience(60, 2 * 1024 * 135e6, cpu) == 60
    assert patience(0, step, cpu) == 0, "off"


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
    loop = loop_of(device, model, Sizes(2, 48, 20, 4, 8, 8), 2)
    dog = Watchdog(0.05, lambda: loop.counters.steps, loop.wants_steps, device.fail)
    dog.start()
    loop.submit(request(0, [1, 2], 38))
    with pytest.raises(DeviceError) as caught:
        while True:
            loop.turn()
    assert isinstance(caught.value.__cause__, StalledError)
    model.release.set()
    dog.stop()
    device.close()
    assert "Stuck" in shown.getvalue() or "release.wait" in shown.getvalue()
    assert loop.counters.steps >= 1


@pytest.mark.parametrize("on_their_way", [True, False])
def test_a_wait_for_transfers_is_no_stall_and_one_for_nothing_is(on_their_way, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    device = CpuDevice(threads=1)
    loop = loop_of(device, ChecksumModel(97, 48), Sizes(2, 48, 20, 4, 8, 8), 2)
    for transfer, page in enumerate([loop.pools[0].take(Pin.LOAD) for _ in range(19)], 1):
        if on_their_way:
            loop.pools[0].fill({page: b"%d" % transfer}, transfer)
    dog = Watchdog(0.05, lambda: loop.counters.steps, loop.wants_steps, device.fail)
    loop.submit(request(0, [1, 2], 38))
    ringing = threading.Timer(0.5, loop.bell.ring)
    ringing.start()
    dog.start()
    with nullcontext() if on_their_way else pytest.raises(DeviceError) as caught:
        assert loop.turn() == ([], [], []) and loop.wants_steps()
    assert on_their_way or isinstance(caught.value.__cause__, StalledError)
    dog.stop()
    ringing.join()
    device.close()


def test_stacks_name_the_threads():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="a thread at rest")
    thread.start()
    text = stacks()
    done.set()
    thread.join()
    assert "a thread at rest:" in text and "test_stacks_name_the_threads" in text
