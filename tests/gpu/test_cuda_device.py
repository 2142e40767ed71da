"""CudaDevice on a GPU: the contract of every device, and what only CUDA can show."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from device_contract import Contract
from torch_internals import spin

from gapless.base.errors import CaptureError, DeviceError
from gapless.device import CudaDevice, accelerator, event_clock

LONG_CYCLES = 2_000_000_000
"""Keeps a GPU busy for about a second."""


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()
    torch.cuda.synchronize()


class TestContract(Contract):
    pass


def test_streams_are_four_and_token_copies_are_most_urgent(device: CudaDevice) -> None:
    streams = (device.compute, device.token_out, device.bulk_out, device.bulk_in)
    assert len({stream.raw.cuda_stream for stream in streams} | {0}) == 5
    assert device.token_out.raw.priority < device.compute.raw.priority < device.bulk_out.raw.priority


def test_ring_memory_is_pinned(device: CudaDevice) -> None:
    assert all(slot.tensor.is_pinned() for slot in device.ring(slots=2, nbytes=100).slots)


def test_reserved_memory_stays_after_a_refused_capture(device: CudaDevice) -> None:
    size, ran = 64 << 20, []

    def reads() -> None:
        ran.append(torch.ones(size // 4, dtype=torch.uint8, device="cuda")[0].item())

    device.reserve(2 * size, size)
    before = device.allocations()
    with pytest.raises(CaptureError, match="host-read"):
        device.capture("reads", reads)
    device.run(
        lambda: torch.empty(
            2 * size - accelerator.SMALL_BLOCKS * accelerator.SMALL_BYTES, dtype=torch.uint8, device="cuda"
        )
    )
    assert ran == [1] and device.allocations() == before


def test_pageable_memory_is_refused(device: CudaDevice) -> None:
    there = torch.zeros(8, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(DeviceError, match="upload from ring memory only"):
        device.run(device.upload, there, torch.zeros(8, dtype=torch.uint8))


def test_the_host_goes_on_while_a_kernel_runs(device: CudaDevice) -> None:
    device.compute.launch(spin, LONG_CYCLES)
    fence = device.compute.record()
    device.token_out.after(fence)
    behind = device.token_out.record()
    free = device.bulk_in.record()
    free.wait()
    assert not fence.done() and not behind.done()
    behind.wait()
    assert fence.done()


def test_fail_wakes_a_wait_while_a_kernel_runs(device: CudaDevice) -> None:
    device.compute.launch(spin, LONG_CYCLES)
    fence = device.compute.record()
    timer = threading.Timer(0.05, device.fail, [TimeoutError("stalled")])
    timer.start()
    with pytest.raises(DeviceError, match="stalled"):
        fence.wait()
    assert not device.compute.raw.query(), "the kernel still ran when the wait ended"
    timer.join()


def test_times_stay_on_the_host_clock_over_a_change_of_base(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_clock, "REBASE_MS", 0.01)
    last = 0
    for _ in range(50):
        before = device.clock()
        device.compute.launch(spin, 100_000)
        fence = device.compute.record(timed=True)
        fence.wait()
        assert before <= fence.time() <= device.clock() and fence.time() >= last
        last = fence.time()
