"""Graphs on the devices that record a tape: what cannot be captured, and that a replay is its program."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device_contract import GraphContract, step
from graph_programs import buffers, random_program
from harness import capturing_cpu
from sharpest import sharpest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_internals import operators

from gapless.base import observe
from gapless.base.errors import CaptureError, DeviceError
from gapless.device import CpuDevice, Device
from gapless.device.record import record
from gapless.engine import checkers
from gapless.guard.race import no_race
from gapless.kernels.linear import TorchLinear
from gapless.testing.sim import SimDevice


@pytest.fixture
def cpu() -> Iterator[CpuDevice]:
    device = capturing_cpu()
    yield device
    device.close()


@pytest.fixture(params=["cpu", "sim", "sim-lazy"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    mood = "lazy" if "lazy" in request.param else None
    device = capturing_cpu() if request.param == "cpu" else SimDevice(5, mood=mood)
    yield device
    device.close()


# What cannot be captured.

X = torch.arange(1.0, 7.0)
OUTS: list[Tensor] = []


def reads_an_item() -> None:
    X.sum().item()


def waits_with_an_excuse() -> None:
    X.sum().item()  # san: ok(a graph cannot hold even a wait that is meant)


REFUSED = {
    "reads an item": (reads_an_item, "host-size"),
    "waits with an excuse": (waits_with_an_excuse, "host-size"),
    "branches on data": (lambda: X.any() and X.add_(1), "host-read"),
    "makes a list": (lambda: X.tolist(), "host-read"),
    "looks for nonzero": (lambda: X.nonzero(), "data-size"),
    "selects by mask": (lambda: X[X > 2].mul(2), "mask-index"),
    "selects masked": (lambda: torch.masked_select(X, X > 2), "data-size"),
    "counts unique": (lambda: torch.unique(X), "counted-size"),
    "compares": (lambda: torch.equal(X, X), "host-read"),
    "repeats by data": (lambda: torch.repeat_interleave(X, torch.ones_like(X).long()), "repeat-interleave"),
    "copies home": (lambda: X.cpu(), "copy-to-host"),
    "assigns an element": (lambda: X.__setitem__(0, 3.0), "scalar-assign"),
    "makes a tensor of a list": (lambda: X[:2].add_(torch.tensor([1.0, 2.0])), "host-operand"),
    "resizes": (lambda: X.resize_(3), "another address"),
    "sets": (lambda: X.set_(torch.zeros(6)), "another address"),
    "assigns data": (lambda: setattr(X, "data", X + 1), "another address"),
    "resizes an output": (lambda: torch.add(X, 1, out=OUTS[-1]), "another address or size"),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("program, words", REFUSED.values(), ids=[*REFUSED])
def test_a_program_that_cannot_be_captured_is_refused_with_its_line(
    device: Device, program: Callable[[], None], words: str
) -> None:
    before = X.clone(), X.data_ptr()
    OUTS.append(torch.zeros(2))
    with pytest.raises(CaptureError, match=words) as caught:
        device.capture("a bucket", program)
    first = program.__code__.co_firstlineno
    lines = [f"test_graphs.py:{line}:" for line in range(first, first + 3)]
    assert any(line in str(caught.value) for line in lines), str(caught.value)
    assert f"{program.__name__} a bucket" in str(caught.value)
    assert X.data_ptr() == before[1]
    X.copy_(before[0])
    device.run(step, torch.ones(1, dtype=torch.int64), 1)  # the device goes on


def test_a_recorded_run_needs_no_more_memory_than_any_other() -> None:
    """Also where ids and storages of tensors that are gone are given again."""
    x = torch.zeros(1000)

    def program() -> None:
        y = x + 1
        for _ in range(20):
            y = (y * 2 + x).relu().view(10, 100).flatten()
        x.copy_(y)

    class Alive(TorchDispatchMode):
        """The most memory of tensors that was alive at once."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}
            self.most = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            self.sizes[id(result)] = result.untyped_storage().nbytes()
            weakref.finalize(result, self.sizes.pop, id(result), None)
            self.most = max(self.most, sum(self.sizes.values()))
            return result

    most = []
    for run in (program, lambda: record("it", program, ())):
        with torch.inference_mode(), Alive() as alive:
            run()
        most.append(alive.most)
    assert most[0] == most[1] < 8 * x.nbytes
    x.zero_()
    program()
    expected = x.clone()
    x.zero_()
    tape = record("it", program, ())
    x.zero_()
    tape.replay()
    assert torch.equal(x, expected) and len(tape.calls) > 60


def test_a_failed_device_captures_nothing(device: Device) -> None:
    device.fail(TimeoutError("stalled"))
    with pytest.raises(DeviceError, match="stalled"):
        device.capture("k", int)


def test_without_native_streams_there_are_no_graphs() -> None:
    device = CpuDevice(threads=1, use_native=False)
    assert not device.caps.captures
    with pytest.raises(CaptureError, match="no native streams: they were not asked for"):
        device.capture("k", int)
    device.close()


def test_a_guard_that_is_silent_around_the_capture_hides_nothing(device: Device) -> None:
    """The simulator runs programs within calls of the host, whose own region may ignore them."""
    from gapless.guard import no_sync, watch

    with no_sync():
        here = watch.current()
        assert here is not None
        with here.silence(), pytest.raises(CaptureError, match="host-size"):
            device.capture("k", reads_an_item)


# A replay is its program.


@pytest.mark.parametrize("seed", sharpest(range(60), 12))
def test_a_replay_equals_the_program_bit_for_bit(device: Device, seed: int) -> None:
    """Whatever is in the buffers: they change between replays, and the program changes them."""
    program = random_program(seed)
    mine, theirs = buffers(seed), buffers(seed)
    graph = device.capture(seed, program, tuple(mine))
    with torch.inference_mode():
        program(*theirs)
        for turn in range(3):
            assert all(map(torch.equal, mine, theirs)), f"after {turn} replays"
            for one, other in zip(mine, theirs, strict=True):
                if one.is_floating_point():
                    one.mul_(0.5).add_(turn)
                    other.mul_(0.5).add_(turn)
            graph.launch(device.compute)
            program(*theirs)
            device.drain()
    assert all(map(torch.equal, mine, theirs))


def test_the_graph_declares_exactly_the_tensors_that_are_touched(device: Device) -> None:
    table, index, out, seen = torch.zeros(8, 4), torch.tensor([1, 2]), torch.zeros(2, 4), torch.zeros(3)

    def program() -> None:
        made = table[2:6].index_select(0, index)
        out.copy_(made)
        seen[1:].add_(torch.zeros_like(seen)[1:])

    graph = device.capture("k", program)
    assert graph.key == "k"
    reads, writes = ([(t.data_ptr(), t.shape) for t in some] for some in (graph.tape.reads, graph.tape.writes))
    assert reads == [(table[2:].data_ptr(), (4, 4)), (index.data_ptr(), (2,))]
    assert writes == [(out.data_ptr(), (2, 4)), (seen[1:].data_ptr(), (2,))]


def test_views_of_outside_tensors_cost_nothing_in_a_replay() -> None:
    device, x = SimDevice(1), torch.zeros(4, 6)
    graph = device.capture("k", lambda: x.T[1:].unsqueeze(0).expand(2, 5, 4).split(1)[0].view(5, 4).reshape(5, 4))
    assert graph.tape.calls == ()


def test_a_graph_keeps_the_tensors_that_are_touched(device: Device) -> None:
    def capture() -> object:
        x, weight = torch.ones(1000), torch.full((1000,), 3.0)
        return device.capture("k", lambda: x.mul_(weight.view(10, 100).flatten()))

    graph = capture()
    gc.collect()
    others = [torch.zeros(1000) for _ in range(50)]
    graph.launch(device.compute)
    device.drain()
    assert graph.tape.writes[0].tolist() == [9.0] * 1000 and not any(other.any() for other in others)


def test_a_packed_weight_without_storage_is_held_by_its_graph(device: Device) -> None:
    """oneDNN's layout has no storage to look at; the graph holds it all the same."""
    x, out, weight = torch.zeros(2, 64), torch.zeros(2, 64), torch.randn(64, 64)
    product = TorchLinear(weight)
    if not product.packed:
        pytest.skip("this torch packs no weights")

    def program() -> None:
        product(x, out)

    graph = device.capture("k", program)
    x.normal_()
    graph.launch(device.compute)
    device.drain()
    torch.testing.assert_close(out, x @ weight.T)
    assert [tensor.data_ptr() for tensor in graph.tape.writes] == [out.data_ptr()]


def test_an_empty_program_is_captured_and_launched(device: Device) -> None:
    graph = device.capture("k", lambda: None)
    graph.launch(device.compute)
    device.drain()


# Streams.


class TestRecordedGraphs(GraphContract):
    pass


def test_graphs_of_two_streams_wait_for_each_other(device: Device) -> None:
    x, seen = torch.ones(1, dtype=torch.int64), torch.zeros(41, dtype=torch.int64)
    forward = device.capture("f", lambda: x.mul_(3).add_(1))
    copies = [device.capture(i, lambda i=i: seen[i : i + 1].copy_(x)) for i in range(40)]
    device.run(lambda: x.fill_(1))
    for copy in copies:
        forward.launch(device.compute)
        device.token_out.after(device.compute.record())
        copy.launch(device.token_out)
        device.compute.after(device.token_out.record())
    device.drain()
    expected = [1]
    for _ in range(40):
        expected.append(expected[-1] * 3 + 1)
    wrapped = [(value + 2**63) % 2**64 - 2**63 for value in expected[1:]]
    assert seen[:40].tolist() == wrapped


@pytest.mark.parametrize("dst, src", [((4,), (5,)), ((4, 2), (2, 4)), ((3,), None)], ids=["size", "shape", "gaps"])
def test_an_upload_copies_bytes_and_nothing_else(device: Device, dst: tuple[int, ...], src: tuple[int, ...]) -> None:
    source = torch.zeros(6)[::2] if src is None else torch.zeros(src)
    with pytest.raises(AssertionError, match="not an upload"):
        device.compute.upload(torch.zeros(dst), source)
    with pytest.raises(AssertionError, match="not an upload"):
        device.compute.upload(torch.zeros(6), torch.zeros(6, dtype=torch.int32))


def test_an_operator_that_fails_in_a_replay_poisons_the_device(device: Device) -> None:
    x, index, ran = torch.zeros(4), torch.zeros(2, dtype=torch.int64), []
    graph = device.capture("bucket 7", lambda: x.add_(x.index_select(0, index).sum()))
    good = device.compute.record()
    good.wait()
    index.fill_(9)
    graph.launch(device.compute)
    bad = device.compute.record()
    with pytest.raises(DeviceError, match="index out of range"):
        bad.wait()
    with pytest.raises(DeviceError, match="index out of range"):
        graph.launch(device.compute)
    with pytest.raises(DeviceError):
        device.compute.launch(ran.append, 1)
    with pytest.raises(DeviceError):
        device.compute.upload(x, x.clone())
    assert good.done() and ran == [] and x.tolist() == [0.0] * 4


def test_the_error_of_a_native_replay_names_operator_and_graph(cpu: CpuDevice) -> None:
    x, index = torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    graph = cpu.capture("bucket 7", lambda: x.index_select(0, index))
    index.fill_(9)
    graph.launch(cpu.compute)
    with pytest.raises(DeviceError, match=r"stream 'compute'.*aten::index_select in .*lambda.* bucket 7: .*range"):
        cpu.drain()


def test_a_python_operator_may_fail_in_a_native_replay(cpu: CpuDevice) -> None:
    """It takes the interpreter's lock, which a stream does not hold."""
    x, fails = torch.ones(3), []

    def twice(value: Tensor) -> Tensor:
        if fails:
            raise ArithmeticError("planted")
        return value * 2

    with operators("gapless_tests") as library:
        library.define("twice(Tensor value) -> Tensor")
        library.impl("twice", twice, "CPU")
        graph = cpu.capture("k", lambda: x.copy_(torch.ops.gapless_tests.twice(x)))
        graph.launch(cpu.compute)
        cpu.drain()
        assert x.tolist() == [4.0] * 3
        fails.append(1)
        graph.launch(cpu.compute)
        with pytest.raises(DeviceError, match=r"gapless_tests::twice.*planted"):
            cpu.drain()


def slow_graph(device: CpuDevice) -> tuple[Tensor, object]:
    """About 0.3 s of work in one replay."""
    x, count = torch.ones(256, 256), torch.zeros(1)

    def program() -> None:
        for _ in range(300):
            torch.mm(x, x)
        count.add_(1)

    return count, device.capture("slow", program)


@pytest.mark.parametrize("end", ["fail", "close"])
def test_a_device_ends_while_graphs_run_and_wait(cpu: CpuDevice, end: str) -> None:
    count, graph = slow_graph(cpu)
    for _ in range(100):
        graph.launch(cpu.compute)
        cpu.compute.upload(count, torch.zeros(1))
    fence = cpu.compute.record()
    cpu.token_out.after(fence)
    graph.launch(cpu.token_out)
    cpu.fail(TimeoutError("stalled")) if end == "fail" else cpu.close()
    with pytest.raises(DeviceError, match="stalled" if end == "fail" else "closed"):
        fence.wait()
    with pytest.raises(DeviceError):
        graph.launch(cpu.compute)
    cpu.close()


def test_a_forgotten_device_is_collected_with_its_graphs() -> None:
    device = capturing_cpu()
    _, graph = slow_graph(device)
    graph.launch(device.compute)
    device.compute.record()
    del device, graph
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "gapless-compute"]


def test_a_chain_runs_while_the_host_holds_the_interpreters_lock(cpu: CpuDevice) -> None:
    """The host computes in Python and never lets go of the lock; the stream goes through its chain all the same."""
    ring = cpu.ring(slots=1, nbytes=8)
    x, add = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    graph = cpu.capture("k", lambda: x.add_(add))
    ring.slots[0].array.view("int64")[0] = 7
    source, start = ring.slots[0].tensor.view(torch.int64), time.monotonic()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        for _ in range(20):
            cpu.compute.upload(add, source)
            graph.launch(cpu.compute)
            fence = cpu.compute.record(timed=True)
        while not fence.done() and time.monotonic() - start < 60:
            pass
        done, asked = fence.done(), []
        # The evidence that the lock is really held: a program of Python's does not get it.
        cpu.compute.launch(asked.append, 1)
        behind = cpu.compute.record()
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            assert not behind.done()
    finally:
        sys.setswitchinterval(before)
    behind.wait()
    assert done and asked == [1] and x.tolist() == [140]


def test_a_wait_can_be_interrupted(cpu: CpuDevice) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals go to the main thread")
    let_go = threading.Event()

    class Rung(Exception):
        pass

    def ring(*args: object) -> None:
        raise Rung

    cpu.compute.launch(let_go.wait)
    fence, before = cpu.compute.record(), signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Rung):
            fence.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
        let_go.set()


def test_many_hosts_launch_and_wait_at_once(cpu: CpuDevice) -> None:
    x = torch.zeros(1, dtype=torch.int64)
    graph = cpu.capture("k", lambda: x.add_(1))
    x.zero_()

    def host() -> None:
        for i in range(200):
            graph.launch(cpu.compute)
            fence = cpu.compute.record()
            if i % 3 == 0:
                fence.wait()

    hosts = [threading.Thread(target=host) for _ in range(4)]
    for thread in hosts:
        thread.start()
    for thread in hosts:
        thread.join(60)
    cpu.drain()
    assert x.tolist() == [800]


def test_a_replay_that_is_watched_shows_its_operators(cpu: CpuDevice) -> None:
    x, y = torch.zeros(4), torch.zeros(4)
    graph = cpu.capture("k", lambda: y.copy_(x * 2))
    with no_race("record") as checker:
        checker.register("x", x)
        assert observe.watcher is not None
        graph.launch(cpu.compute)
        x.add_(1)
        cpu.drain()
    assert [race.buffer for race in checker.races] == ["x"]


def test_a_capture_that_nothing_checks_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that went into a graph unseen would return the value of the capture for ever."""
    monkeypatch.setattr(observe, "capture_check", observe.unchecked)
    with pytest.raises(CaptureError, match=r"nothing checks .* gapless.engine.checkers.connect\(\)"):
        device.capture("k", int)
    checkers.connect()
    assert device.capture("k", int).key == "k"
