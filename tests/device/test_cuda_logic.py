"""CudaDevice's own logic against a stand-in for torch.cuda whose work ends when the test says so."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from gapless.base import observe
from gapless.base.errors import CaptureError, DeviceError
from gapless.device import CudaDevice, accelerator, cuda


class FakeStream:
    def __init__(self, owner: FakeCuda, priority: int) -> None:
        self.owner, self.priority = owner, priority
        self.cuda_stream = 0 if owner.one_handle else len(owner.streams) + 1
        self.idle = threading.Event()
        self.idle.set()
        self.waited: list[FakeEvent] = []
        owner.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.owner.check()
        self.waited.append(event)


class FakeEvent:
    def __init__(self, owner: FakeCuda, enable_timing: bool, blocking: bool) -> None:
        self.owner, self.timed, self.blocking = owner, enable_timing, blocking
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.owner.check()
        assert self.stream is None, "an event was recorded twice"
        self.stream, self.ns = stream, time.monotonic_ns()

    def query(self) -> bool:
        self.owner.check()
        assert self.stream is not None
        return self.stream.idle.is_set()

    def synchronize(self) -> None:
        assert self.stream is not None
        self.owner.sleeps += 1
        assert self.stream.idle.wait(60)
        self.owner.check()

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timed and end.timed
        return (end.ns - self.ns) / 1e6


class FakeGraph:
    """Keeps what was done with it, and under which stream."""

    def __init__(self, owner: FakeCuda) -> None:
        self.owner, self.calls = owner, []

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        self.calls.append(("begin", pool, capture_error_mode, self.owner.current[-1]))

    def capture_end(self) -> None:
        self.calls.append(("end",))
        self.owner.check()

    def replay(self) -> None:
        self.calls.append(("replay", self.owner.current[-1]))


class FakeCuda:
    """As much of torch.cuda as CudaDevice uses. `error` is what every call then raises."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.current: list[FakeStream] = []
        self.error: RuntimeError | None = None
        self.one_handle = False
        self.sleeps = self.synchronized = self.emptied = 0
        self.freed = 2
        self.devices: list[torch.device] = []
        self.pinned: list[tuple[int, list[torch.device]]] = []
        self.graphs: list[FakeGraph] = []

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def Stream(self, device: torch.device, priority: int) -> FakeStream:
        return FakeStream(self, priority)

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing, blocking)

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        self.devices.append(device)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()

    def cudart(self) -> SimpleNamespace:
        """As much of the runtime as pins memory: for the device that is chosen."""

        def pin(address: int, *_: int) -> int:
            self.pinned.append((address, self.devices[-1:]))
            return 0

        return SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=pin, cudaError=SimpleNamespace(success=0))

    def synchronize(self, device: torch.device) -> None:
        self.synchronized += 1

    def empty_cache(self) -> None:
        self.emptied += 1

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 3, 4

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, int]:
        return {"num_device_alloc": 5, "num_device_free": self.freed}

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> FakeGraph:
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]

    @contextlib.contextmanager
    def stream(self, raw: FakeStream) -> Iterator[None]:
        self.current.append(raw)
        yield
        self.current.pop()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(cuda, "torch_cuda", fake)
    return fake


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[CudaDevice]:
    device = CudaDevice()
    # Opening waits for the clock's base event; the tests count what comes after.
    fake.sleeps = 0
    yield device
    for stream in fake.streams:
        stream.idle.set()
    device.close()


def test_programs_run_at_once_under_their_stream(device: CudaDevice, fake: FakeCuda) -> None:
    seen: list[tuple[FakeStream, bool]] = []
    for stream in (device.token_out, device.compute):
        stream.launch(lambda: seen.append((fake.current[-1], torch.is_inference_mode_enabled())))
    assert seen == [(device.token_out.raw, True), (device.compute.raw, True)] and fake.current == []
    assert device.token_out.raw.priority < device.compute.raw.priority < device.bulk_in.raw.priority
    assert device.memory() == (3, 4) and device.torch_device == torch.device("cuda", 0)


def test_memory_of_a_peer_is_pinned_for_the_device_though_its_thread_has_chosen_none(
    device: CudaDevice, fake: FakeCuda
) -> None:
    memory = np.zeros(4096, np.uint8)
    end = device.adopt(memory)
    assert end is not None
    end()
    assert fake.pinned == [(memory.ctypes.data, [device.torch_device])] * 2 and fake.devices == []


def test_equal_stream_handles_are_refused(fake: FakeCuda) -> None:
    fake.one_handle = True
    with pytest.raises(AssertionError, match="the same CUDA stream twice"):
        CudaDevice()


def test_a_fence_follows_its_stream(device: CudaDevice, fake: FakeCuda) -> None:
    device.compute.raw.idle.clear()
    fence = device.compute.record()
    device.token_out.after(fence)
    assert not fence.done() and len(device.token_out.raw.waited) == 1
    device.compute.raw.idle.set()
    assert fence.done()
    fence.wait()
    assert fake.sleeps == 0, "a fence that is done costs no sleep"


def asleep(fake: FakeCuda, wait: Callable[[], object]) -> threading.Thread:
    """A thread that waits, once it sleeps on an event."""
    waiter = threading.Thread(target=wait)
    waiter.start()
    while not fake.sleeps:
        assert waiter.is_alive()
    return waiter


def test_a_long_wait_sleeps_on_the_event(device: CudaDevice, fake: FakeCuda) -> None:
    device.compute.raw.idle.clear()
    fence = device.compute.record()
    waiter = asleep(fake, fence.wait)
    device.compute.raw.idle.set()
    waiter.join(60)
    assert not waiter.is_alive() and fence.done() and fake.sleeps == 1
    assert fake.devices == [device.torch_device], "the helper thread has chosen its device"


def test_a_bell_wakes_a_wait_and_the_event_is_waited_for_again(device: CudaDevice, fake: FakeCuda) -> None:
    device.compute.raw.idle.clear()
    fence = device.compute.record()
    ended: list[bool] = []
    waiter = asleep(fake, lambda: ended.append(fence.wait(device.bell)))
    device.bell.ring()
    waiter.join(60)
    assert ended == [False] == [fence.wait(device.bell)] and not fence.done()
    device.bell.clear()
    device.compute.raw.idle.set()
    assert fence.wait(device.bell)


def test_a_fence_that_passed_before_a_failure_is_done_though_seen_after_it(device: CudaDevice) -> None:
    passed = device.compute.record()
    device.compute.raw.idle.clear()
    open_still = device.token_out.record()
    device.token_out.raw.idle.clear()
    device.compute.raw.idle.set()
    device.fail(TimeoutError("stalled"))
    assert passed.done() and passed.wait()
    for fence in (open_still, device.compute.record()):
        with pytest.raises(DeviceError, match="stalled"):
            fence.done()


def test_fail_wakes_a_wait_on_a_hung_gpu(device: CudaDevice, fake: FakeCuda) -> None:
    device.compute.raw.idle.clear()
    fence = device.compute.record()
    caught: list[DeviceError] = []

    def wait() -> None:
        try:
            fence.wait()
        except DeviceError as error:
            caught.append(error)

    waiter = asleep(fake, wait)
    failure = TimeoutError("stalled")
    device.fail(failure)
    waiter.join(60)
    assert [error.__cause__ for error in caught] == [failure]
    assert not device.compute.raw.idle.is_set(), "it still hangs"
    with pytest.raises(DeviceError, match="stalled"):
        device.drain()
    assert fake.synchronized == 0, "a failed device is not waited for"


@pytest.mark.parametrize("call", ["done", "record", "after", "sleep"])
def test_an_error_left_by_a_kernel_becomes_a_device_error(device: CudaDevice, fake: FakeCuda, call: str) -> None:
    fence = device.compute.record()
    if call == "sleep":
        device.compute.raw.idle.clear()
        timer = threading.Thread(target=lambda: [_until(lambda: fake.sleeps > 0), _break(fake, device)])
        timer.start()
        with pytest.raises(DeviceError, match="illegal address"):
            fence.wait()
        timer.join(60)
        return
    fake.error = RuntimeError("illegal address")
    if call == "after":
        device.token_out.after(fence)
    late = device.token_out.record() if call != "done" else fence
    with pytest.raises(DeviceError, match=r"device reported.*illegal address") as caught:
        late.done()
    assert caught.value.__cause__ is fake.error
    with pytest.raises(DeviceError, match="illegal address"):
        device.compute.launch(int)


def _until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        pass


def _break(fake: FakeCuda, device: CudaDevice) -> None:
    fake.error = RuntimeError("illegal address")
    device.compute.raw.idle.set()


def test_a_programs_error_shows_at_the_fence_and_an_interrupt_at_once(device: CudaDevice) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.compute.launch(interrupted)
    with pytest.raises(DeviceError, match="KeyboardInterrupt"):
        device.compute.record().done()


def test_drain_waits_for_every_stream_and_the_default_one(device: CudaDevice, fake: FakeCuda) -> None:
    device.bulk_in.raw.idle.clear()
    drainer = asleep(fake, device.drain)
    assert fake.synchronized == 0
    device.bulk_in.raw.idle.set()
    drainer.join(60)
    assert fake.synchronized == 1


def test_timed_fences_lie_on_the_host_clock(device: CudaDevice) -> None:
    before = device.clock()
    fences = [device.compute.record(timed=True) for _ in range(10)]
    assert all(fence.done() for fence in fences)
    times = [fence.time() for fence in fences]
    assert before <= times[0] and times == sorted(times) and times[-1] <= device.clock()
    untimed = device.compute.record()
    untimed.wait()
    with pytest.raises(AssertionError, match="timed=True"):
        untimed.time()


def test_copies_take_ring_memory_only(device: CudaDevice) -> None:
    plain = torch.zeros(8, dtype=torch.uint8)
    for copy in (device.upload, device.download):
        with pytest.raises(AssertionError, match="ring memory only"):
            copy(plain, plain)


def test_a_graph_is_captured_on_compute_and_replayed_where_asked(device: CudaDevice, fake: FakeCuda) -> None:
    x, collecting = torch.zeros(4), []

    def program(y: torch.Tensor) -> None:
        y.add_(1)
        collecting.append((fake.current[-1], gc.isenabled(), len(fake.graphs)))

    graph = device.capture("bucket", program, (x,))
    raw, compute = fake.graphs[0], device.compute.raw
    # What is captured is run neither before its memory is there, nor while the collector may free some.
    assert collecting[-1] == (compute, False, 1) and all(run == (compute, True, 0) for run in collecting[:-1])
    assert len(collecting) == 2 and gc.isenabled()
    assert graph.key == "bucket" and [t.data_ptr() for t in graph.writes] == [x.data_ptr()] and graph.reads == ()
    graph.launch(device.compute)
    graph.launch(device.token_out)
    begin = ("begin", "pool", "thread_local", compute)
    assert raw.calls[:2] == [begin, ("end",)]
    assert raw.calls[-2:] == [("replay", compute), ("replay", device.token_out.raw)]


class Kinded(NamedTuple):
    """A key of a program of many sizes."""

    size: int
    kind: str = "forward"


def test_the_first_program_of_a_kind_is_recorded_and_every_one_while_a_checker_watches(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(4)

    def seen(key: Kinded, program: Callable[..., object] = lambda: x.add_(1)) -> int:
        return len(device.capture(key, program).writes)

    monkeypatch.setattr(observe, "steps", None)
    assert [seen(Kinded(1)), seen(Kinded(2)), seen(Kinded(3, "other")), seen(Kinded(4, "other"))] == [1, 0, 1, 0]
    assert x.tolist() == [8.0] * 4, "each ran, and was captured"
    monkeypatch.setattr(observe, "steps", object())
    assert seen(Kinded(5)) == 1
    monkeypatch.setattr(observe, "steps", None)

    def breaks() -> None:
        raise ValueError("planted")

    with pytest.raises(CaptureError, match="planted"):
        device.capture(Kinded(6), breaks)
    with pytest.raises(CaptureError, match="host-read"):
        device.capture(Kinded(7, "new"), lambda: torch.ones(1).item())
    with pytest.raises(CaptureError, match="host-read"):
        device.capture(Kinded(8, "new"), lambda: torch.ones(1).item())  # a refused one was not the first
    assert seen(Kinded(9)) == 0


def test_memory_is_reserved_for_programs_and_in_the_pool_of_the_graphs(
    device: CudaDevice, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[FakeStream, int, int]] = []
    monkeypatch.setattr(fake, "mem_get_info", lambda device: (4_000, 8_000))
    monkeypatch.setattr(
        accelerator, "take_and_give_back", lambda _, count: taken.append((fake.current[-1], count, len(fake.graphs)))
    )
    device.reserve(700, 0)
    assert taken == [(device.compute.raw, 700, 0)] and not fake.graphs
    device.reserve(5_000, 900)
    expected = ((1_000, 0), (900, 0), (900, 1), (1_000, 1))
    assert taken[1:] == [(device.compute.raw, count, graphs) for count, graphs in expected]
    assert fake.graphs[0].calls[0][:2] == ("begin", "pool")
    assert device.allocations() == 7


def test_memory_stays_reserved_for_programs_after_a_refused_capture(
    device: CudaDevice, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the allocator has given some back to the driver: it does where memory was short."""
    taken: list[tuple[FakeStream, int]] = []

    def take(device: torch.device, count: int) -> None:
        taken.append((fake.current[-1], count))
        if len(taken) > 1:
            raise torch.OutOfMemoryError("others have it by now")

    monkeypatch.setattr(fake, "mem_get_info", lambda device: (4_000, 8_000))
    monkeypatch.setattr(accelerator, "take_and_give_back", take)

    def gives_back() -> None:
        fake.freed += 1
        torch.ones(1).item()

    device.reserve(700, 0)
    with pytest.raises(CaptureError, match="host-read"):
        device.capture("bucket", lambda: torch.ones(1).item())
    assert len(taken) == 1, "nothing was given back"
    with pytest.raises(CaptureError, match="host-read"):
        device.capture("bucket", gives_back)
    assert taken == [(device.compute.raw, 700)] * 2 and not fake.emptied
    device.run(int)  # what others have does not fail the device


@pytest.mark.parametrize("nbytes", [1, 5 << 20, 34 << 20, 200 << 20])
def test_reserved_memory_is_as_large_as_asked_for(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: made.append(size) or empty(size, **options))
    accelerator.take_and_give_back(torch.device("cpu"), nbytes)
    small = [size for size in made if size == accelerator.SMALL_BYTES]
    assert sum(made) == nbytes and len(small) <= accelerator.SMALL_BLOCKS and sum(small) <= nbytes / 2


def test_a_program_that_cuda_cannot_capture_leaves_the_device_well(device: CudaDevice, fake: FakeCuda) -> None:
    def fails_in_capture() -> None:
        if fake.graphs:
            raise RuntimeError("operation not permitted when stream is capturing")

    refused = r"fails_in_capture bucket cannot be captured: RuntimeError: operation not permitted"
    with pytest.raises(CaptureError, match=refused):
        device.capture("bucket", fails_in_capture)
    assert fake.graphs[0].calls[-1] == ("end",) and gc.isenabled()
    with pytest.raises(CaptureError, match="host-read"):
        device.capture("bucket", lambda: torch.ones(1).item())
    device.run(int)


def test_checkers_see_a_replay(device: CudaDevice) -> None:
    x, seen = torch.zeros(4), []
    graph = device.capture(7, lambda: x.add_(1))

    class Watcher:
        def replayed(self, *what: object) -> None:
            seen.append(what)

        def launched(self, stream: object, program: object, args: object, reads: object) -> object:
            return program

    watcher = Watcher()
    observe.add(watcher)  # type: ignore[arg-type]
    try:
        graph.launch(device.compute)
    finally:
        observe.remove(watcher)  # type: ignore[arg-type]
    assert seen == [(device.compute, "graph 7", (), graph.writes)]


def test_close_ends_the_helper_and_restores_the_interpreter(fake: FakeCuda) -> None:
    before, threads = sys.getswitchinterval(), set(threading.enumerate())
    device = CudaDevice()
    assert sys.getswitchinterval() <= before
    device.close()
    device.close()
    assert sys.getswitchinterval() == before
    assert set(threading.enumerate()) <= threads
    with pytest.raises(DeviceError, match="closed"):
        device.compute.launch(int)
