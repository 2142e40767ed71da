"""open_device, what the machine offers, and the ring's refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gapless.base import host
from gapless.base.errors import ConfigError
from gapless.device import CpuDevice, gpus, open_device
from gapless.device.cpu import threads_of
from gapless.device.ring import zeros_of_pages
from gapless.testing.sim import SimDevice


def test_a_name_opens_its_device() -> None:
    cpu = open_device("cpu", threads=2)
    assert isinstance(cpu, CpuDevice) and cpu.threads == 2 and cpu.kind == "cpu"
    assert cpu.torch_device == SimDevice().torch_device == torch.device("cpu")
    cpu.close()


def test_auto_takes_cuda_only_where_there_is_one() -> None:
    device = open_device()
    assert device.kind == ("cuda" if torch.cuda.is_available() else "cpu")
    device.close()


def test_an_unknown_name_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda, rocm, xpu, ascend, npu, gaudi, hpu, mps, fake, got 'tpu'"):
        open_device("tpu")


def test_cuda_without_cuda_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cpu"):
        open_device("cuda")


def test_gpus_are_listed_by_name_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device | None] = [torch.device("cuda"), None]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: seen.pop(0))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name=f"G{i}", total_memory=i + 5)
    )
    assert gpus() == [("G0", 5), ("G1", 6)]
    assert gpus() == []


def test_threads_zero_takes_most_usable_cores() -> None:
    assert [threads_of(cores) for cores in (1, 2, 3, 4, 7, 8, 16)] == [1, 2, 3, 3, 6, 6, 14]
    device = CpuDevice()
    assert device.threads == threads_of(host.usable_cores()) >= 1
    device.close()


def test_a_ring_has_slots_and_bytes() -> None:
    device = SimDevice()
    for slots, nbytes in ((0, 8), (2, 0)):
        with pytest.raises(AssertionError, match="a ring of"):
            device.ring(slots, nbytes)


def test_host_memory_that_is_not_there_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"the host has no [\d,]+ bytes of memory: ask for less"):
        zeros_of_pages(1 << 60)
