"""The fake accelerator by its own record and by the general class: the contract, and replays, whatever is late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from device_contract import Contract, GraphContract
from graph_programs import buffers, random_program

from gapless.base.errors import ConfigError, DeviceError
from gapless.device import Device, device_class, open_device
from gapless.testing import fake

pytestmark = pytest.mark.fake
MOODS: dict[str, tuple[int | None, bool | None]] = {"in time": (None, None), "by seed": (7, False), "lazy": (7, True)}


@pytest.fixture(params=[("fake", mood) for mood in MOODS] + [("accelerator:fake", "lazy")], ids=" ".join)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    name, mood = request.param
    fake.load()
    device = device_class(name).open(0)
    seed, lazy = MOODS[mood]
    fake.delays(seed, lazy=lazy)
    yield device
    fake.delays(None)
    device.close()
    torch.accelerator.synchronize()


class TestFakeContract(Contract, GraphContract):
    pass


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 7, 8, 9])  # the others make a tensor on the CPU
def test_a_replay_on_the_fake_equals_the_cpu_s_program_bit_for_bit(device: Device, seed: int) -> None:
    program, theirs = random_program(seed), buffers(seed)
    mine = [tensor.to(device.torch_device) for tensor in theirs]
    device.drain()
    graph = device.capture(seed, program, tuple(mine))
    device.drain()
    for one, other in zip(mine, buffers(seed), strict=True):  # the run before the capture has changed them
        one.copy_(other)
    device.drain()
    with torch.inference_mode():
        for turn in range(3):
            graph.launch(device.compute)
            device.drain()
            program(*theirs)
            assert all(torch.equal(one.cpu(), other) for one, other in zip(mine, theirs, strict=True)), turn


def test_auto_takes_the_record_of_a_package() -> None:
    fake.load()
    assert device_class("auto") is fake.FakeDevice


def test_a_number_beyond_the_devices_that_are_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no fake device 3, torch sees 1"):
        open_device("fake", number=3)


def test_a_kernel_that_fails_late_is_the_device_s_report() -> None:
    device = open_device("fake")
    rows, index = torch.ones(4, device="fake"), torch.tensor([9], device="fake")
    device.drain()
    fake.hold(True)  # so that the waiter's thread is the first to see it
    device.compute.launch(lambda: rows[index])
    with pytest.raises(DeviceError, match=r"the device reported.*out of (range|bounds)"):
        device.compute.record().wait()
    device.close()
    fake.hold(False)
    fake.reset()
