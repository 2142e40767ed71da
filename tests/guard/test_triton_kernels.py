"""Triton's kernels on an emulated device: the interpreter runs them, and the memory that they touch is followed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gapless import guard
from gapless.guard.detectors import Detectors
from gapless.guard.emulate import emulated_cuda
from gapless.guard.refusals import NotEmulatedError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def _add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def _column(x, stride, which, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(x + at * stride + which, 1.0)


def _follow(pointers, out):
    tl.store(out, tl.load(tl.load(pointers).to(tl.pointer_type(tl.float32))))


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return triton.jit(_add), triton.jit(_column), triton.jit(_follow)


def raced(first, second) -> list[str]:
    """Return the rules that are found when these run on two streams without an order."""
    detectors = Detectors(["sync", "race"], emulate_cuda=True)
    with detectors:
        x, y = torch.ones(64, 4, device="cuda"), torch.zeros(3, 256, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        first(x, y)
        with torch.cuda.stream(side):
            second(x, y)
    return [entry.finding.rule for entry in detectors.findings()]


def test_kernels_that_read_the_same_and_write_apart_do_not_race(kernels):
    add = kernels[0]

    def into(row):
        return lambda x, y: add[(4,)](x, x, y[row], 200, BLOCK=64)

    assert raced(into(0), into(1)) == []
    assert raced(into(0), into(0)) == ["race"]
    assert raced(into(0), lambda x, y: y[0, 200:].sum()) == []
    assert raced(into(0), lambda x, y: y[0, 199:].sum()) == ["race"]
    assert raced(into(0), lambda x, y: x.add_(1)) == ["race"]


def test_kernels_that_write_columns_race_at_the_same_column_alone(kernels):
    column = kernels[1]

    def into(number):
        return lambda x, y: column[(1,)](x, 4, number, BLOCK=64)

    assert raced(into(0), into(1)) == []
    assert raced(into(0), into(0)) == ["race"]


def test_memory_behind_a_pointer_in_memory_is_followed(kernels):
    follow, kept = kernels[2], []

    def first(x, y):
        kept.append(torch.tensor([x.data_ptr()], device="cuda"))
        follow[(1,)](kept[0], y)

    assert sorted(raced(first, lambda x, y: x.add_(1))) == ["list-to-device", "race"]


def test_a_kernel_beside_a_host_tensor_is_reported_and_pinned_memory_is_the_streams(kernels):
    add = kernels[0]
    assert raced(lambda x, y: add[(1,)](x, x, torch.zeros(64), 64, BLOCK=64), lambda x, y: None) == ["host-operand"]
    pinned = guard.pinned_tensor(torch.zeros(64))

    def first(x, y):
        add[(1,)](x, x, pinned, 64, BLOCK=64)
        assert pinned[0].item() == 2

    assert raced(first, lambda x, y: None) == ["race"]


def test_autotuned_kernels_take_their_first_configuration_and_graphs_replay_kernels(kernels):
    tuned = triton.autotune([triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["count"])(kernels[0])
    with emulated_cuda(), guard.no_sync(mode="record"):
        x, out = torch.ones(10, device="cuda"), torch.zeros(10, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tuned[lambda meta: (triton.cdiv(10, meta["BLOCK"]),)](x, x, out, 10)
        x.fill_(5)
        graph.replay()
        assert out.tolist() == [10] * 10 and tuned.best_config.kwargs == {"BLOCK": 4}


def test_a_launch_without_the_interpreter_names_the_way_to_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernel = triton.jit(_add)
    with emulated_cuda(), guard.no_sync(mode="record"):
        assert triton.runtime.driver.active.get_current_target().backend == "cuda"
        x = torch.ones(4, device="cuda")
        with pytest.raises(NotEmulatedError, match=r"the Triton kernel _add, unless .* set TRITON_INTERPRET=1"):
            kernel[(1,)](x, x, x, 4, BLOCK=4)


@pytest.mark.process
def test_triton_is_not_imported_for_a_program_without_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys, torch\ntorch.ones(1, device='cuda')\nassert 'triton' not in sys.modules\n")
    command = [sys.executable, "-m", "gapless.guard.run", "--device-tensors", "cuda", str(program)]
    assert subprocess.run(command, check=False, timeout=100).returncode == 0
