"""no_race on real CUDA streams: a double-buffered loop with and without its fences, and plain torch programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from guard.test_race_checker import double_buffered

from gapless.device import CudaDevice
from gapless.guard.race import no_race


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()
    torch.cuda.synchronize()


def test_a_double_buffered_loop_is_silent_with_its_fences_and_caught_without(device: CudaDevice) -> None:
    for run in range(20):
        with no_race("record") as right:
            double_buffered(device, right, wait=True)
        with no_race("record") as wrong:
            double_buffered(device, wrong, wait=False)
        assert right.races == [], f"run {run}\n{right.races[0]}"
        assert {race.buffer.split("[")[0] for race in wrong.races} == {"staging", "tokens"}, f"run {run}"
        assert all("stream compute" in race.missing or "stream token_out" in race.missing for race in wrong.races)


@pytest.mark.parametrize("waits", [True, False])
def test_two_streams_without_an_order_are_reported(waits: bool) -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    memory = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    with no_race("record") as checker:
        checker.register("memory", memory)
        with torch.cuda.stream(one):
            memory.fill_(1.0)
        if waits:
            other.wait_stream(one)
        with torch.cuda.stream(other):
            total = memory.sum()
        other.synchronize()
        assert total.item() >= 0
    assert len(checker.races) == (0 if waits else 1)


@pytest.mark.parametrize("waits", [True, False])
def test_a_pinned_buffer_is_written_again(waits: bool) -> None:
    pinned, memory = torch.zeros(1024, pin_memory=True), torch.zeros(1024, device="cuda")
    array = pinned.numpy()
    torch.cuda.synchronize()
    with no_race("record") as checker:
        checker.register("pinned", pinned, host=True)
        memory.copy_(pinned, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if waits:
            event.synchronize()
        pinned.add_(1.0)
        memory.copy_(pinned, non_blocking=True)
        event.record()
        if waits:
            event.synchronize()
        array[:] = 5.0
        torch.cuda.synchronize()
    assert {race.rule for race in checker.races} == (set() if waits else {"race", "overwritten"})


def test_reading_a_result_orders_the_host() -> None:
    pinned, memory = torch.zeros(8, pin_memory=True), torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with no_race() as checker:
        checker.register("pinned", pinned)
        pinned.copy_(memory, non_blocking=True)
        assert memory.sum().item() == 8.0
        assert pinned.tolist() == [1.0] * 8
        pinned.copy_(memory)
        pinned.zero_()
        memory.copy_(pinned)
        pinned.fill_(2.0)
        home = memory.cpu()
        memory.add_(1.0)
        assert home.tolist() == [0.0] * 8


@pytest.mark.parametrize("waits", [True, False])
def test_memory_filled_on_one_stream_is_read_on_another(waits: bool) -> None:
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with no_race("record", track="all") as checker:
        empty, memory = torch.empty(1024, device="cuda"), torch.zeros(1024, device="cuda")
        if waits:
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            empty.fill_(1.0)
            memory.add_(1.0)
        torch.cuda.synchronize()
    assert [race.second.verb for race in checker.races] == ([] if waits else ["writes"])


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_goes_back_to_the_stream_that_it_was_allocated_on(recorded: bool) -> None:
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with no_race("record", track="all") as checker:
        memory = torch.ones(1024, device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            memory.add_(1.0)
        if recorded:
            memory.record_stream(other)
        del memory
        torch.empty(1024, device="cuda")
        torch.cuda.synchronize()
    assert [race.second.verb for race in checker.races] == ([] if recorded else ["reuses the memory of"])


@pytest.mark.parametrize("early", [True, False])
def test_a_copy_home_that_makes_its_own_pinned_memory(early: bool) -> None:
    memory = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    with no_race("record", track="all") as checker:
        home = memory.to("cpu", non_blocking=True)
        if not early:
            torch.cuda.synchronize()
        home.tolist()
        torch.cuda.synchronize()
    assert len(checker.races) == early
