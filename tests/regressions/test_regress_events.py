"""Rows of the class event: a fence that is recorded twice, too early, or waited for in a harmful way."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
from fronts_and_cores import SHAPE, engine_core, front_of, read_all
from harness import VOCAB
from scenes import FakeCuda, broken, must_fail, tokens

from gapless.base.errors import EngineDeadError
from gapless.base.params import SamplingParams
from gapless.device import CpuDevice, CudaDevice, cuda
from gapless.device.accelerator_stream import AcceleratorFence
from gapless.testing.checksum import ChecksumModel

pytestmark = pytest.mark.unguarded


def test_row_061_a_long_wait_sleeps():
    """A thread that spun on an event held the driver's lock, and slowed down all others in turn. Here a wait asks for
    a moment only and then sleeps on a blocking event, on a helper thread, until the device says so."""

    def scene():
        fake = FakeCuda()
        with patch.object(cuda, "torch_cuda", fake):
            device = CudaDevice()
            try:
                fence = device.compute.record()
                assert fake.events[-1].blocking
                fake.busy = True
                fence.wait()
                assert fake.sleeps == 1, f"{fake.questions} questions and no sleep"
            finally:
                device.close()

    scene()
    with broken(AcceleratorFence, "sleep", lambda fence, bell: None):
        scene()


class Hanging(ChecksumModel):
    """Its fifth forward comes back only when it is let go."""

    def __init__(self):
        super().__init__(VOCAB, SHAPE.max_len)
        self.count, self.let_go = 0, threading.Event()

    def forward(self, inputs, plan, cache):
        self.count += 1
        if self.count == 5:
            assert self.let_go.wait(60)
        return super().forward(inputs, plan, cache)


async def test_row_062_a_device_that_hangs_ends_the_wait(capfd):
    """After hours the host hung in a wait for an event, and no request got an error. Here a watchdog sees that work
    is present and no step completes: it prints all stacks, the wait ends, and every open request gets the reason."""
    model = Hanging()
    core = engine_core(CpuDevice(threads=1), model, watchdog=0.2)
    async with front_of(core) as llm:
        try:
            streams = [await llm.open(tokens(key, 4), SamplingParams(temperature=0.0, max_tokens=40)) for key in (1, 2)]
            for stream in streams:
                with pytest.raises(EngineDeadError, match=r"no step completed for 0\.2 s"):
                    await read_all(stream)
            assert not llm.is_ready
        finally:
            model.let_go.set()
    assert "stacks of all threads" in capfd.readouterr().err


def test_lifetime_L10_two_streams_are_two():
    """A pool of streams gave the same stream twice, so what looked like two did not overlap, or waited for itself. Here
    the handles are compared when the device is opened, and two that are equal are refused."""
    with patch.object(cuda, "torch_cuda", FakeCuda()):
        CudaDevice().close()
    with patch.object(cuda, "torch_cuda", FakeCuda(one_handle=True)), must_fail():
        CudaDevice()
