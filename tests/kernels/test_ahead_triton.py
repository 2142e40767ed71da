"""Kernels that are compiled before anything launches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import torch

from gapless.kernels import ahead_triton
from gapless.kernels.ahead_triton import ahead
from gapless.kernels.norm_triton import _rms_norm, rms_norm

HERE = Path(__file__).parent


@pytest.mark.parametrize(("heads", "tokens"), [((4, 2), 2048), ((14, 2), 2048), ((4, 4), 300)], ids=str)
def test_kinds_of_steps_leave_no_kernel_to_a_replay_and_few_to_eager_steps(heads, tokens):
    """Whatever the number of query heads that share keys, by which a chunk of a few tokens gets its tile."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "kinds_of_steps.py"), *map(str, (*heads, tokens))],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["ahead"] > 80 and found["lanes"] > 10
    assert not found["late"]
    assert len(found["rare"]) <= 2, found["rare"]


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """Compilations for sm_90 that nothing is loaded from."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nothing is said
    monkeypatch.setattr(aot.triton.runtime.driver, "_active", aot._Driver(90))
    monkeypatch.setattr(ahead_triton.facts, "current", lambda: 0)
    monkeypatch.setattr(ahead_triton._Loader, "_load", lambda self, compiles: compiles())


def test_launches_inside_compile_and_run_nothing(no_gpu):
    x, weight = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    before = aot.compiled(_rms_norm)
    with ahead():
        for _ in range(3):
            rms_norm(x, weight, 1e-6)
    assert aot.compiled(_rms_norm) == before + 1
    kernel = list(_rms_norm.device_caches[aot.NOWHERE][0].values())[-1]
    assert "cubin" in kernel.asm
    assert "__getitem__" not in vars(aot.triton.JITFunction)


def test_what_programs_leave_unwritten_is_zeros():
    with ahead_triton._Zeros():
        made = [torch.empty(1 << 16), torch.ones(3).new_empty(1 << 16), torch.empty_like(torch.ones(9))]
    assert not any(tensor.count_nonzero() for tensor in made)


def test_a_program_that_raises_leaves_launches_as_they_were(no_gpu):
    with pytest.raises(ZeroDivisionError), ahead():
        _ = 1 // 0
    assert "__getitem__" not in vars(aot.triton.JITFunction)


def test_a_kernel_that_fails_is_left_to_its_first_launch(no_gpu, monkeypatch):
    def fails(self, compiles):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(ahead_triton._Loader, "_load", fails)
    before = aot.compiled(_rms_norm)
    with ahead():
        rms_norm(torch.ones(4, 40, dtype=torch.bfloat16), torch.ones(40, dtype=torch.bfloat16), 1e-6)
    kernels = list(_rms_norm.device_caches[aot.NOWHERE][0].values())
    assert all(hasattr(kernel, "asm") for kernel in kernels) and len(kernels) == before
