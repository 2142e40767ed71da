"""CpuDevice: the contract, real asynchrony, and threads that never outlive their device."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from device_contract import Contract

from gapless.base.errors import DeviceError
from gapless.device import CpuDevice, cpu_native, worker
from gapless.device.seam import STREAMS


@pytest.fixture(params=[True, False], ids=["native", "python"])
def use_native(request: pytest.FixtureRequest) -> bool:
    """The streams of a machine with a compiler, and those of one without."""
    native: bool = request.param
    if native and cpu_native.load() is None:
        pytest.skip(f"no native streams: {cpu_native.reason()}")
    return native


@pytest.fixture
def device(use_native: bool) -> Iterator[CpuDevice]:
    device = CpuDevice(threads=1, use_native=use_native)
    yield device
    device.close()


class Held:
    """A program that runs until the host lets it go."""

    def __init__(self) -> None:
        self.running, self.let_go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.running.set()
        assert self.let_go.wait(60)


@pytest.fixture
def held() -> Iterator[Held]:
    program = Held()
    yield program
    program.let_go.set()


def stream_threads() -> list[threading.Thread]:
    """Threads that work for streams; an engine of another test may still have others."""
    names = {f"gapless-{name}" for name in STREAMS}
    return [thread for thread in threading.enumerate() if thread.name in names]


def ours() -> list[str]:
    return [thread.name for thread in stream_threads()]


class TestContract(Contract):
    pass


def test_the_host_goes_on_while_a_program_runs(device: CpuDevice, held: Held) -> None:
    ran: list[int] = []
    device.compute.launch(held)
    fence = device.compute.record()
    device.compute.launch(ran.append, 1)
    device.token_out.after(fence)
    device.token_out.launch(ran.append, 2)
    behind = device.token_out.record()
    assert held.running.wait(60)
    assert not fence.done() and not behind.done() and ran == []
    device.bulk_out.launch(ran.append, 3)
    device.bulk_out.record().wait()
    assert ran == [3] and not fence.done(), "a stream without a fence does not wait for another"
    held.let_go.set()
    behind.wait()
    device.drain()
    assert fence.done() and sorted(ran) == [1, 2, 3]


def test_a_bell_ends_the_wait_for_a_program_that_hangs(device: CpuDevice, held: Held) -> None:
    device.compute.launch(held)
    fence = device.compute.record()
    assert held.running.wait(60)
    device.bell.ring()
    assert not fence.wait(device.bell), "rung before the wait"
    assert device.bell.rung, "until it is cleared"
    device.bell.clear()
    for _ in range(3):
        ringing = threading.Timer(0.01, device.bell.ring)
        ringing.start()
        assert not fence.wait(device.bell), "rung while the host waits, awake or asleep"
        ringing.join()
        device.bell.clear()
    held.let_go.set()
    assert fence.wait(device.bell) and not device.bell.rung


def test_a_failure_ends_a_wait_for_the_bell(device: CpuDevice) -> None:
    failing = threading.Timer(0.05, device.fail, (TimeoutError("stalled"),))
    failing.start()
    with pytest.raises(DeviceError, match="stalled"):
        device.bell.wait(600)
    failing.join()


def test_a_slot_stays_away_while_its_fence_is_open(device: CpuDevice, held: Held) -> None:
    ring = device.ring(slots=2, nbytes=8)
    slot = ring.acquire()
    assert slot is not None
    device.compute.launch(held)
    ring.retire(slot, device.compute.record())
    other = ring.acquire()
    assert other is not None and other is not slot
    ring.retire(other, device.bulk_in.record())
    device.bulk_in.record().wait()
    assert ring.acquire() is None, "the oldest slot's fence is open, whatever the next one's says"
    held.let_go.set()
    device.drain()
    assert ring.acquire() is slot


@pytest.mark.parametrize("end", ["fail", "close"])
def test_waits_end_while_a_program_hangs(device: CpuDevice, held: Held, end: str) -> None:
    ran: list[int] = []
    device.compute.launch(held)
    fence = device.compute.record()
    device.token_out.after(fence)
    device.token_out.launch(ran.append, 1)
    outcomes: list[BaseException | None] = []

    def wait() -> None:
        try:
            fence.wait()
            outcomes.append(None)
        except DeviceError as error:
            outcomes.append(error.__cause__)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    assert held.running.wait(60)
    failure = TimeoutError("stalled")
    if end == "fail":
        device.fail(failure)
    else:
        closer = threading.Thread(target=device.close)
        closer.start()
    for waiter in waiters:
        waiter.join(60)
    assert len(outcomes) == 3 and not held.let_go.is_set()
    assert all(isinstance(cause, TimeoutError if end == "fail" else DeviceError) for cause in outcomes)
    held.let_go.set()
    if end == "close":
        closer.join(60)
    device.close()
    assert ran == [] and ours() == []


def test_close_leaves_a_hanging_thread_behind_and_says_so(
    use_native: bool, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(worker, "INTERRUPT_SECONDS", 0.01)
    before = sys.getswitchinterval()
    device = CpuDevice(threads=1, use_native=use_native)
    device.compute.launch(held)
    assert held.running.wait(60)
    with pytest.warns(RuntimeWarning, match="hangs on compute"):
        device.close()
    assert sys.getswitchinterval() == before
    held.let_go.set()
    for thread in stream_threads():
        thread.join(60)
    assert ours() == []


def test_close_interrupts_a_program_that_goes_on(use_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(worker, "INTERRUPT_SECONDS", 60.0)
    device = CpuDevice(threads=1, use_native=use_native)
    running = threading.Event()

    def endless() -> None:
        while True:
            running.set()

    device.compute.launch(endless)
    assert running.wait(60)
    device.close()
    assert ours() == []


def test_a_program_of_the_device_can_close_it(use_native: bool) -> None:
    device = CpuDevice(threads=1, use_native=use_native)
    closed: list[bool] = []

    def close() -> None:
        device.close()
        closed.append(True)

    device.compute.launch(close)
    with pytest.raises(DeviceError, match="closed"):
        device.compute.record().wait()
    for thread in stream_threads():
        thread.join(60)
    assert ours() == [] and closed == [True]


def test_streams_have_threads_only_when_used(use_native: bool) -> None:
    device = CpuDevice(threads=1, use_native=use_native)
    device.drain()
    assert ours() == []
    device.run(int)
    assert ours() == ["gapless-compute"]
    device.drain()
    assert ours() == ["gapless-compute"]
    device.close()
    assert ours() == []


def test_a_forgotten_device_is_collected(use_native: bool) -> None:
    device = CpuDevice(threads=1, use_native=use_native)
    device.run(int)
    gone = weakref.ref(device)
    fence = device.compute.record()
    fence.wait()
    del device
    gc.collect()
    assert gone() is None and ours() == []
    assert fence.done()


def test_an_idle_stream_keeps_no_argument_alive(device: CpuDevice) -> None:
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    device.compute.launch(lambda _: None, big)
    del big
    # The second fence is passed after the thread has come back for more work.
    device.compute.record().wait()
    device.compute.record().wait()
    assert gone() is None


@pytest.fixture
def interval() -> Iterator[float]:
    """Another switch interval than the interpreter's and ours."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_the_switch_interval_is_short_while_any_device_is_open(use_native: bool, interval: float) -> None:
    first, second = CpuDevice(threads=1, use_native=use_native), CpuDevice(threads=1, use_native=use_native)
    assert sys.getswitchinterval() == pytest.approx(worker.SWITCH_SECONDS)
    first.close()
    first.close()
    assert sys.getswitchinterval() == pytest.approx(worker.SWITCH_SECONDS)
    second.close()
    assert sys.getswitchinterval() == interval


def in_new_thread(function: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    return results[0]


def test_the_thread_that_opens_a_device_keeps_its_thread_count(use_native: bool) -> None:
    fresh = in_new_thread(torch.get_num_threads)

    def open_and_use() -> int:
        device = CpuDevice(threads=fresh + 2, use_native=use_native)
        device.run(int)
        device.close()
        return torch.get_num_threads()

    assert in_new_thread(open_and_use) == fresh


def test_each_stream_keeps_its_own_thread_count(use_native: bool) -> None:
    mine = torch.get_num_threads()
    device = CpuDevice(threads=3, use_native=use_native)
    counts: dict[str, int] = {}

    def look(name: str) -> None:
        torch.zeros(100_000).add_(1)
        counts[name] = torch.get_num_threads()

    streams = (device.compute, device.token_out, device.bulk_out)
    # All threads have set their counts before any runs its first parallel op, the moment at which torch looks again.
    for program in (lambda name: None, look):
        for stream in streams:
            stream.launch(program, stream.name)
        device.drain()
    device.close()
    assert counts == {"compute": 3, "token_out": 1, "bulk_out": 1}
    assert torch.get_num_threads() == mine


EXIT = """
import threading, torch
from gapless.device import CpuDevice, worker
worker.GRACE_SECONDS = 0.1
worker.INTERRUPT_SECONDS = {seconds}
device = CpuDevice(1, {native})
started = threading.Event()
{program}
device.compute.launch(program)
fence = device.compute.record()
device.token_out.after(fence)
assert started.wait(60)
print("leaving", flush=True)
"""
BUSY = """
x = torch.ones(64, 64)
def program():
    started.set()
    while True:
        x.matmul(x)
"""
STUCK = """
def program():
    started.set()
    threading.Event().wait()
"""


@pytest.mark.process
@pytest.mark.parametrize(("program", "seconds"), [(BUSY, 60.0), (STUCK, 0.1)], ids=["busy", "stuck"])
def test_the_interpreter_exits_with_an_open_device(use_native: bool, program: str, seconds: float) -> None:
    code = EXIT.format(program=program, seconds=seconds, native=use_native)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr
