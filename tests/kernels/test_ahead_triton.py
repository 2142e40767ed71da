"""Kernels that are compiled before anything launches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import torch

from gapless.kernels import ahead_triton
from gapless.kernels.ahead_triton import ahead
from gapless.kernels.norm_triton import rms_norm, rms_norm_kernel

HERE = Path(__file__).parent


CASES = ("4,2,2048,draft_model", "14,2,2048,", "4,4,300,ngram", "8,2,2048,ngram,gfx942")
"""Query heads, KV heads, tokens of a step, what drafts, a GPU that is not Hopper's. A launch with an option that the
GPU's compiler lacks, or with more threads than a block may have, ends the process."""


@pytest.fixture(scope="module")
def kinds_of_steps() -> dict[str, str]:
    """What kinds_of_steps.py prints of each case; it imports torch and Triton once for all."""
    path = os.pathsep.join([str(HERE), *map(str, HERE.parents[:2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "kinds_of_steps.py"), *CASES],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, done.stdout.splitlines(), strict=True))


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_kinds_of_steps_leave_no_kernel_to_a_replay_and_few_to_eager_steps(case, kinds_of_steps):
    """Whatever the number of query heads that share keys, by which a chunk of a few tokens gets its tile. To steps with
    drafts they leave none, captured or not."""
    found = json.loads(kinds_of_steps[case])
    assert 50 < found["ahead"] < (100 if case.endswith(",") else 120) and found["lanes"] > 10
    assert not found["late"]
    assert len(found["rare"]) <= 2, found["rare"]


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """Compilations for sm_90 that nothing is loaded from."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nothing is said
    aot.use_driver(monkeypatch, 90)
    monkeypatch.setattr(ahead_triton.facts, "current", lambda: 0)
    monkeypatch.setattr(ahead_triton.Loader, "load", lambda self, compiles: compiles())


def test_launches_inside_compile_and_run_nothing(no_gpu):
    x, weight = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    before = aot.compiled(rms_norm_kernel)
    with ahead():
        for _ in range(3):
            rms_norm(x, weight, 1e-6)
    assert aot.compiled(rms_norm_kernel) == before + 1
    kernel = list(rms_norm_kernel.device_caches[aot.NOWHERE][0].values())[-1]
    assert "cubin" in kernel.asm
    assert "__getitem__" not in vars(aot.triton.JITFunction)


def test_missing_kernels_are_compiled_by_other_processes(no_gpu, monkeypatch):
    hits = []
    monkeypatch.setattr(aot.triton.knobs.compilation, "listener", lambda **what: hits.append(what["cache_hit"]))
    with ahead():
        for width in (72, 80, 88):
            rms_norm(torch.ones(4, width, dtype=torch.bfloat16), torch.ones(width, dtype=torch.bfloat16), 1e-6)
    assert hits == [True] * 3


def test_every_job_is_done_once_by_some_process(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead_triton, "usable_cores", lambda: 3)
    log = tmp_path / "log"

    def job(number):
        with log.open("a") as file:
            file.write(f"{number} {os.getpid()}\n")
        assert number % 7  # goes no further than its process

    ahead_triton.fill_cache([partial(job, number) for number in range(300)])
    lines = [line.split() for line in log.read_text().splitlines()]
    assert lines.pop(0) == ["0", str(os.getpid())]  # this one says whether it was cached
    assert sorted(int(number) for number, _ in lines) == list(range(300))
    assert str(os.getpid()) not in {process for _, process in lines}


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(ahead_triton, "FORKED_SECONDS", 0.1)
    monkeypatch.setattr(ahead_triton, "usable_cores", lambda: 2)
    here, forked, children = os.getpid(), ahead_triton.forked_worker, []
    monkeypatch.setattr(ahead_triton, "forked_worker", lambda *what: children.append(forked(*what)) or children[-1])
    ahead_triton.fill_cache([lambda: time.sleep(600 * (os.getpid() != here))] * 2)
    assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_an_interrupt_ends_the_processes_and_is_raised(no_gpu, monkeypatch):
    """The futures end too: AsyncCompileMode would wait for them for ever."""
    forked, runs, children = ahead_triton.forked_worker, ahead_triton.runs, []

    def interrupted(child):
        monkeypatch.setattr(ahead_triton, "runs", runs)
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead_triton, "forked_worker", lambda *what: children.append(forked(*what)) or children[-1])
    monkeypatch.setattr(ahead_triton, "runs", interrupted)
    with pytest.raises(KeyboardInterrupt), ahead():
        rms_norm(torch.ones(4, 104, dtype=torch.bfloat16), torch.ones(104, dtype=torch.bfloat16), 1e-6)
    assert children
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_one_kernel_of_another_model_in_the_cache_does_not_make_it_filled(monkeypatch):
    jobs, cached, forked = [lambda number=number: number for number in range(10)], [], []
    monkeypatch.setattr(ahead_triton, "fork_all", lambda jobs, children: forked.append(len(cached)))
    monkeypatch.setattr(ahead_triton, "is_cached", cached.__contains__)
    for count in (1, 5, 10):
        cached[:] = jobs[:count]
        ahead_triton.fill_cache(jobs)
    assert forked == [1, 5]


def test_a_process_has_nothing_of_its_parent_open():
    """Its parent's end is seen by a process that reads what the parent had open."""
    read, write = os.pipe()
    todo, jobs = os.pipe()
    child = ahead_triton.forked_worker(todo, [])
    os.close(write)
    assert os.read(read, 1) == b"", "the child has closed its end"
    for descriptor in (jobs, todo, read):
        os.close(descriptor)
    assert os.waitpid(child, 0)[0] == child


def test_a_machine_that_refuses_processes_compiles_in_threads(no_gpu, monkeypatch):
    def refuses():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuses)
    before = aot.compiled(rms_norm_kernel)
    with ahead():
        rms_norm(torch.ones(4, 96, dtype=torch.bfloat16), torch.ones(96, dtype=torch.bfloat16), 1e-6)
    assert aot.compiled(rms_norm_kernel) == before + 1


def test_memory_that_programs_leave_unwritten_is_zeros():
    with ahead_triton.Zeros():
        made = [torch.empty(1 << 16), torch.ones(3).new_empty(1 << 16), torch.empty_like(torch.ones(9))]
    assert not any(tensor.count_nonzero() for tensor in made)


def test_a_program_that_raises_leaves_launches_as_they_were(no_gpu):
    with pytest.raises(ZeroDivisionError), ahead():
        _ = 1 // 0
    assert "__getitem__" not in vars(aot.triton.JITFunction)


def test_a_kernel_that_fails_is_left_to_its_first_launch(no_gpu, monkeypatch):
    def fails(self, compiles):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(ahead_triton.Loader, "load", fails)
    before = aot.compiled(rms_norm_kernel)
    with ahead():
        rms_norm(torch.ones(4, 40, dtype=torch.bfloat16), torch.ones(40, dtype=torch.bfloat16), 1e-6)
    kernels = list(rms_norm_kernel.device_caches[aot.NOWHERE][0].values())
    assert all(hasattr(kernel, "asm") for kernel in kernels) and len(kernels) == before
