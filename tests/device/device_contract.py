"""What every device must do, and each that captures. A test class inherits a contract and gives a `device` fixture."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from gapless.base.errors import CaptureError, DeviceError
from gapless.device import Device


def step(x: torch.Tensor, i: int) -> None:
    # Does not commute, so the result shows the order.
    x.mul_(3).add_(i).remainder_(1_000_003)


def steps(count: int) -> int:
    value = 1
    for i in range(count):
        value = (value * 3 + i) % 1_000_003
    return value


def read(device: Device, x: torch.Tensor) -> list[int]:
    device.drain()
    return x.cpu().tolist()


def ones(device: Device, n: int = 1) -> torch.Tensor:
    return torch.ones(n, dtype=torch.int64, device=device.torch_device)


def boom() -> None:
    raise ArithmeticError("planted")


class Contract:
    def test_a_stream_keeps_the_order_of_launch(self, device: Device) -> None:
        x = ones(device)
        device.drain()
        for i in range(100):
            device.compute.launch(step, x, i)
        assert read(device, x) == [steps(100)]

    def test_another_stream_waits_for_a_fence(self, device: Device) -> None:
        x, seen = ones(device), ones(device, 40)
        device.drain()
        for i in range(40):
            device.compute.launch(step, x, i)
            stepped = device.compute.record()
            device.token_out.after(stepped)
            device.token_out.launch(lambda i=i: seen[i : i + 1].copy_(x))
            # The next step overwrites x, so it waits for the copy: both directions are exercised.
            device.compute.after(device.token_out.record())
        assert read(device, seen) == [steps(i + 1) for i in range(40)]

    def test_the_host_s_work_follows_its_fence_and_the_order_of_the_calls(self, device: Device) -> None:
        ran: list[int] = []
        seen: list[tuple[str, bool]] = []
        for i in range(20):
            device.compute.launch(lambda i=i: ran.append(i))
            device.attend(lambda i=i: seen.append((f"after {i}", i in ran)), device.compute.record())
            device.attend(lambda i=i: seen.append((f"{i}", True)))
        deadline = time.monotonic() + 20
        while len(seen) < 40:
            device.drain()
            assert time.monotonic() < deadline
        assert seen == [(name, True) for i in range(20) for name in (f"after {i}", f"{i}")]

    def test_work_of_the_host_that_raises_fails_the_device(self, device: Device) -> None:
        device.attend(boom)
        with pytest.raises(DeviceError, match="planted"):
            while True:
                device.drain()

    def test_run_returns_after_the_device_is_done(self, device: Device) -> None:
        x = ones(device)
        device.drain()
        device.run(step, x, 5)
        assert x.tolist() == [8]

    def test_programs_run_in_inference_mode(self, device: Device) -> None:
        modes: list[bool] = []
        device.run(lambda: modes.append(torch.is_inference_mode_enabled()))
        device.bulk_in.launch(lambda: modes.append(torch.is_inference_mode_enabled()))
        device.drain()
        assert modes == [True, True]
        assert not torch.is_inference_mode_enabled()

    def test_bytes_go_up_and_come_back(self, device: Device) -> None:
        ring = device.ring(slots=2, nbytes=1000)
        up, down = ring.acquire(), ring.acquire()
        assert up is not None and down is not None
        up.array[:] = torch.arange(1000).remainder(251).numpy()
        there = torch.zeros(1000, dtype=torch.uint8, device=device.torch_device)
        device.drain()
        device.compute.launch(device.upload, there, up.tensor, reads=(up.tensor,), writes=(there,))
        device.token_out.after(device.compute.record())
        device.token_out.launch(device.download, down.tensor, there)
        device.token_out.record().wait()
        assert down.array.tolist() == [i % 251 for i in range(1000)]

    def test_ring_memory_is_aligned_and_zeroed(self, device: Device) -> None:
        slots = device.ring(slots=3, nbytes=70).slots
        assert [slot.index for slot in slots] == [0, 1, 2]
        for slot in slots:
            assert slot.tensor.data_ptr() == slot.array.ctypes.data and slot.tensor.data_ptr() % 64 == 0
            assert slot.array.shape == (70,) and not slot.array.any()
            slot.array[:] = slot.index + 1
        assert [int(slot.tensor.max()) for slot in slots] == [1, 2, 3]
        assert [slot.tensor[:64].view(torch.int64).numel() for slot in slots] == [8, 8, 8]

    def test_a_slot_comes_back_in_ring_order_behind_its_fence(self, device: Device) -> None:
        ring = device.ring(slots=2, nbytes=8)
        first, second = ring.acquire(), ring.acquire()
        assert first is not None and second is not None and ring.acquire() is None
        fence = device.compute.record()
        ring.retire(second, fence)
        fence.wait()
        assert ring.acquire() is None, "the oldest slot is still held"
        ring.retire(first, fence)
        assert ring.acquire() is first and ring.acquire() is second

    def test_a_slot_is_retired_once(self, device: Device) -> None:
        ring = device.ring(slots=1, nbytes=8)
        slot = ring.acquire()
        assert slot is not None
        ring.retire(slot, device.compute.record())
        with pytest.raises(AssertionError, match="without being acquired"):
            ring.retire(slot, device.compute.record())

    def test_times_follow_the_stream_and_the_host_clock(self, device: Device) -> None:
        x = ones(device, 1000)
        device.drain()
        before = device.clock()
        fences = []
        for i in range(20):
            device.compute.launch(step, x, i)
            fences.append(device.compute.record(timed=True))
        device.bulk_out.after(fences[-1])
        fences.append(device.bulk_out.record(timed=True))
        device.drain()
        assert all(fence.done() for fence in fences)
        times = [fence.time() for fence in fences]
        assert times == sorted(times)
        assert before <= times[0] and times[-1] <= device.clock()

    def test_time_needs_a_timed_fence(self, device: Device) -> None:
        fence = device.compute.record()
        fence.wait()
        with pytest.raises(AssertionError, match="timed=True"):
            fence.time()

    def test_polling_a_fence_ends(self, device: Device) -> None:
        x = ones(device)
        device.drain()
        device.compute.launch(step, x, 0)
        device.token_out.after(device.compute.record())
        fence = device.token_out.record()
        while not fence.done():
            pass
        assert x.tolist() == [3]

    def test_an_error_is_carried_to_every_later_fence(self, device: Device) -> None:
        good = device.compute.record()
        good.wait()
        ran: list[int] = []
        device.compute.launch(boom)
        bad = device.compute.record()
        device.token_out.after(bad)
        # A device may have run the program by now, and then refuses to launch.
        with contextlib.suppress(DeviceError):
            device.token_out.launch(ran.append, 1)
        late = device.token_out.record()
        for fence in (bad, late):
            with pytest.raises(DeviceError, match=r"compute.*planted") as caught:
                fence.wait()
            assert isinstance(caught.value.__cause__, ArithmeticError)
            with pytest.raises(DeviceError):
                fence.done()
        for launch in (lambda: device.compute.launch(ran.append, 2), lambda: device.bulk_in.launch(ran.append, 3)):
            with pytest.raises(DeviceError, match="planted"):
                launch()
        with pytest.raises(DeviceError, match="planted"):
            device.drain()
        assert ran == []
        assert good.done(), "what passed before the error stays passed"

    def test_run_raises_what_the_program_raised(self, device: Device) -> None:
        with pytest.raises(DeviceError, match="planted"):
            device.run(boom)

    def test_fail_ends_everything_and_the_first_failure_wins(self, device: Device) -> None:
        first = TimeoutError("stalled")
        device.fail(first)
        device.fail(TimeoutError("again"))
        fence = device.compute.record()
        for call in (fence.wait, fence.done, device.drain, lambda: device.compute.launch(boom)):
            with pytest.raises(DeviceError, match="stalled") as caught:
                call()
            assert caught.value.__cause__ is first

    def test_a_failed_device_hands_out_no_fenced_slot(self, device: Device) -> None:
        ring = device.ring(slots=1, nbytes=8)
        slot = ring.acquire()
        assert slot is not None
        device.fail(TimeoutError("stalled"))
        ring.retire(slot, device.compute.record())
        with pytest.raises(DeviceError, match="stalled"):
            ring.acquire()

    def test_a_failed_device_can_be_closed_twice(self, device: Device) -> None:
        device.compute.launch(boom)
        device.bulk_in.after(device.compute.record())
        fence = device.bulk_in.record()
        device.close()
        device.close()
        with pytest.raises(DeviceError):
            fence.wait()
        with pytest.raises(DeviceError):
            device.compute.launch(boom)

    def test_free_memory_is_at_most_the_total(self, device: Device) -> None:
        free, total = device.memory()
        assert 0 < free <= total

    def test_a_fence_that_has_passed_is_done_whatever_rings(self, device: Device) -> None:
        fence = device.compute.record()
        assert fence.wait()
        device.bell.ring()
        assert fence.wait(device.bell) and device.bell.rung
        device.bell.clear()
        assert not device.bell.rung

    def test_the_bell_is_waited_for_until_it_is_rung_or_the_time_is_over(self, device: Device) -> None:
        device.bell.ring()
        assert device.bell.wait(600) and device.bell.wait(600), "until it is cleared"
        device.bell.clear()
        begin = device.clock()
        assert not device.bell.wait(0.02) and device.clock() - begin >= 20_000_000
        device.bulk_in.launch(device.bell.ring)
        assert device.bell.wait(600) and device.bell.rung
        device.fail(TimeoutError("stalled"))
        with pytest.raises(DeviceError, match="stalled"):
            device.bell.wait(600)

    def test_a_stream_rings_when_it_is_done_with_what_came_before(self, device: Device) -> None:
        x, bulk = ones(device, 1000), device.bulk_in
        device.drain()
        for i in range(20):
            bulk.launch(step, x, i)
        fence = bulk.record()
        bulk.ring(device.bell)
        assert device.bell.wait(600) and fence.done()
        device.bell.clear()
        device.drain()
        assert not device.bell.rung, "once"

    def test_a_failure_is_raised_although_the_bell_is_rung(self, device: Device) -> None:
        device.bell.ring()
        device.fail(TimeoutError("stalled"))
        with pytest.raises(DeviceError, match="stalled"):
            device.compute.record().wait(device.bell)

    def test_a_wait_without_a_bell_is_not_interrupted(self, device: Device) -> None:
        x = ones(device, 1000)
        device.drain()
        device.bell.ring()
        for i in range(20):
            device.compute.launch(step, x, i)
        fence = device.compute.record()
        assert fence.wait() and x[0].item() == steps(20)


class GraphContract:
    def test_replays_uploads_and_programs_keep_their_order(self, device: Device) -> None:
        ring = device.ring(slots=3, nbytes=8)
        x, add = ones(device), ones(device)
        device.drain()
        graph = device.capture("k", lambda: x.mul_(3).add_(add).remainder_(1_000_003))
        device.run(lambda: x.fill_(1))  # the run before a capture has changed it
        for i in range(100):
            while (slot := ring.acquire()) is None:
                pass
            slot.array.view("int64")[0] = i
            if i % 5:
                source = slot.tensor.view(torch.int64)
                device.compute.launch(device.upload, add, source, reads=(source,), writes=(add,))
                graph.launch(device.compute)
            else:
                device.compute.launch(step, x, i)
            ring.retire(slot, device.compute.record())
        assert read(device, x) == [steps(100)]

    def test_a_replay_and_a_copy_of_two_streams_wait_for_each_other(self, device: Device) -> None:
        x, i, seen = ones(device), ones(device), ones(device, 60)
        device.drain()
        graph = device.capture("steps", lambda: (step(x, i), i.add_(1)))
        device.run(lambda: (x.fill_(1), i.fill_(0)))
        for turn in range(60):
            graph.launch(device.compute)
            device.token_out.after(device.compute.record())
            device.token_out.launch(lambda turn=turn: seen[turn : turn + 1].copy_(x))
            device.compute.after(device.token_out.record())
        assert read(device, seen) == [steps(turn + 1) for turn in range(60)]

    def test_a_refused_capture_names_its_line_and_the_device_continues(self, device: Device) -> None:
        x = ones(device)
        device.drain()
        with pytest.raises(CaptureError, match=r"device_contract.py:\d+: host-size"):
            device.capture("reads", lambda: x.add_(x.sum().item()))
        with pytest.raises(CaptureError, match="boom k cannot be captured: ArithmeticError: planted"):
            device.capture("k", boom)
        graph = device.capture("adds", lambda: x.add_(1))
        device.run(lambda: x.fill_(1))
        graph.launch(device.compute)
        assert read(device, x) == [2]
