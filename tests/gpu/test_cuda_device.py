"""CUDA by CudaDevice and by AcceleratorDevice alone: the contract, graphs, and what only a GPU can show."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_contract import Contract, GraphContract
from torch import Tensor
from torch_internals import spin

from gapless.base.errors import CaptureError, DeviceError
from gapless.device import AcceleratorDevice, CudaDevice, Device, accelerator, event_clock, open_device

CLASSES = ("cuda", "accelerator:cuda")
LONG_CYCLES = 1_000_000_000
"""Keeps a GPU busy for about half a second."""


@pytest.fixture(params=CLASSES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_device(request.param)
    yield device
    device.close()
    torch.cuda.synchronize()


only_cuda = pytest.mark.parametrize("device", CLASSES[:1], indirect=True)


@pytest.fixture
def capturing(device: Device) -> Device:
    return that_captures(device)


def that_captures(device: Device) -> Device:
    if not device.caps.captures:
        pytest.skip(f"{device.kind} captures nothing with torch {torch.__version__}")
    return device


class TestCudaContract(Contract):
    pass


class TestCudaGraphs(GraphContract):
    @pytest.fixture
    def device(self, device: Device) -> Device:
        return that_captures(device)


@only_cuda
def test_token_copies_are_most_urgent(device: CudaDevice) -> None:
    assert device.token_out.raw.priority < device.compute.raw.priority < device.bulk_out.raw.priority


def test_streams_are_four_and_those_of_the_general_class_are_torchs(
    device: Device, request: pytest.FixtureRequest
) -> None:
    streams = (device.compute, device.token_out, device.bulk_out, device.bulk_in)
    assert len({stream.raw.stream_id for stream in streams} | {0}) == 5
    plain = all(type(stream.raw) is torch.Stream and not hasattr(stream, "cudart") for stream in streams)
    general = isinstance(device, AcceleratorDevice) and not isinstance(device, CudaDevice)
    assert general == plain == (request.node.callspec.params["device"] != "cuda")


def test_memory_of_the_host_is_pinned_and_begins_with_a_page(device: Device) -> None:
    assert all(slot.tensor.is_pinned() for slot in device.ring(slots=2, nbytes=100).slots)
    memory = device.host_memory(3 << 20)
    assert memory.is_pinned() and memory.nbytes == 3 << 20 and memory.data_ptr() % 4096 == 0 and not memory.any()


def test_memory_is_the_gpus(device: Device) -> None:
    free, total = device.memory()
    assert total == torch.cuda.mem_get_info()[1] and 0 < free <= total
    before = device.allocations()
    device.run(lambda: torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    assert device.allocations() >= before


@only_cuda
def test_reserved_memory_stays_after_a_refused_capture(device: CudaDevice) -> None:
    size, ran = 64 << 20, []

    def reads() -> None:
        ran.append(torch.ones(size // 4, dtype=torch.uint8, device="cuda")[0].item())

    device.reserve(2 * size, size)
    before = device.allocations()
    with pytest.raises(CaptureError, match="host-read"):
        device.capture("reads", reads)
    left = 2 * size - accelerator.SMALL_BLOCKS * accelerator.SMALL_BYTES
    device.run(lambda: torch.empty(left, dtype=torch.uint8, device="cuda"))
    assert ran == [1] and device.allocations() == before


@only_cuda
def test_pageable_memory_is_refused(device: CudaDevice) -> None:
    there = torch.zeros(8, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises(DeviceError, match="upload from ring memory only"):
        device.run(device.upload, there, torch.zeros(8, dtype=torch.uint8))


def test_the_host_goes_on_while_a_kernel_runs(device: Device) -> None:
    device.compute.launch(spin, LONG_CYCLES)
    fence = device.compute.record(timed=True)
    device.token_out.after(fence)
    behind = device.token_out.record()
    device.bulk_in.record().wait()
    assert not fence.done() and not behind.done()
    behind.wait()
    assert fence.done() and fence.time() <= device.clock()


def test_fail_wakes_a_wait_while_a_kernel_runs(device: Device) -> None:
    device.compute.launch(spin, LONG_CYCLES)
    fence = device.compute.record()
    timer = threading.Timer(0.05, device.fail, [TimeoutError("stalled")])
    timer.start()
    with pytest.raises(DeviceError, match="stalled"):
        fence.wait()
    assert not device.compute.raw.query(), "the kernel still ran when the wait ended"
    timer.join()


@only_cuda
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


FAULT = """
import sys, torch
from gapless.base.errors import DeviceError
from gapless.device import open_device
device = open_device(sys.argv[1])
table, index = torch.zeros(4, device="cuda"), torch.tensor([9], device="cuda")
device.drain()
passed = device.compute.record()
passed.wait()
device.compute.launch(lambda: table[index])
try:
    device.compute.record().wait()
except DeviceError as error:
    print("FOUND", isinstance(error.__cause__, RuntimeError), passed.done(), error)
device.close()
"""


@pytest.mark.parametrize("name", CLASSES)
def test_a_kernel_that_fails_shows_at_the_next_fence(name: str) -> None:
    """In a process of its own: after such an error CUDA does nothing more."""
    command = [sys.executable, "-c", FAULT, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert found and found[0].startswith("FOUND True True"), done.stdout + done.stderr
    assert "device-side assert" in found[0]


def changes(x: Tensor, total: Tensor, rows: Tensor, state: Tensor) -> None:
    """A program over given buffers whose kernels add in one order."""
    y = x.index_select(0, rows).mul_(0.5).add_(1)
    total.add_((y @ x.T).softmax(-1) @ y)
    x.copy_(torch.cat([x[:, 4:], y[:, :4]], -1))
    state.mul_(3).add_(rows).remainder_(1_000_003)


def buffers() -> list[Tensor]:
    make = torch.Generator().manual_seed(5)
    x, total = (torch.randn(8, 8, generator=make) for _ in range(2))
    rows = torch.randperm(8, generator=make)
    return [tensor.cuda() for tensor in (x, total, rows, torch.arange(8))]


def test_a_replay_on_cuda_equals_its_program_bit_for_bit(capturing: Device) -> None:
    mine, theirs = buffers(), buffers()
    graph = capturing.capture("changes", changes, tuple(mine))
    capturing.drain()
    for one, other in zip(mine, buffers(), strict=True):  # warm-up runs have changed them
        one.copy_(other)
    torch.cuda.synchronize()
    for turn in range(4):
        graph.launch(capturing.compute)
        capturing.run(changes, *theirs)
        assert all(map(torch.equal, mine, theirs)), f"after {turn + 1} replays"
        for x in (mine[0], theirs[0]):
            x.mul_(0.5).add_(turn)
        torch.cuda.synchronize()


def test_graphs_on_cuda_share_a_pool_that_reserved_memory_fills(capturing: Device) -> None:
    capturing.reserve(64 << 20, 64 << 20)
    before = capturing.allocations()
    x = torch.ones(1 << 20, device="cuda")
    for number in range(4):
        capturing.capture(("adds", number), lambda: x.add_((x * 2).sum() * 0))
    assert capturing.allocations() - before <= 2, "x, and at most one more"
