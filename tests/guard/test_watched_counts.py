"""A run says what it watched, calls nothing clean that it did not see, and finds by itself how to see it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from gapless.guard.detectors import Detectors
from gapless.guard.names import names_cuda

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


def test_a_program_without_device_tensors_is_not_called_clean(san_source):
    code, report, out = san_source("import torch\ntorch.zeros(2).tolist()\n")
    assert (code, report["findings"], report["watched"]["device_tensors"]) == (3, [], 0)
    last = out.err.splitlines()[-1]
    assert last.startswith("gapless san: nothing was watched: no tensor was on a device")
    assert "0 reports" not in out.err and "--device-tensors cuda" in last


@without_gpu
def test_a_clean_program_says_what_was_watched(san_source):
    source = """
        import subprocess, sys, threading, torch
        x = torch.zeros(4, device="cuda")
        ring = torch.zeros(4, pin_memory=True)
        thread = threading.Thread(target=lambda: x + 1)
        thread.start()
        thread.join()
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            y = torch.ones(4, device="cuda")
            y.copy_(ring, non_blocking=True)
        subprocess.run([sys.executable, "-c", ""], check=True)
    """
    code, report, out = san_source(source)
    assert code == 0, out.err
    counts = {"device_tensors": 3, "copies": 1, "streams": 2, "threads": 2, "processes": 1}
    assert report["watched"] == {**counts, "children": 0, "lost": 0}
    assert "watched 3 device tensors, 1 copy, 2 streams, 2 threads; 1 process started by it, not watched" in out.err
    assert out.err.endswith("gapless san: 0 reports at 0 sites, 0 sites allowed\n")


@without_gpu
def test_cuda_is_emulated_by_itself_where_the_program_names_it(san_source):
    source = """
        import torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.zeros(2, device=device).tolist()
    """
    code, report, out = san_source(source)
    assert (code, [found["rule"] for found in report["findings"]]) == (1, ["host-read"])
    assert "no GPU here, and program.py names cuda: it is emulated on the CPU" in out.err
    assert san_source(source, "--device-tensors", "marked")[0] == 3


@without_gpu
def test_an_argument_of_the_program_names_cuda_too(san_source):
    source = "import sys, torch\ntorch.zeros(2, device=sys.argv[1]).tolist()\n"
    assert san_source(source, args=("cuda:0",))[0] == 1


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"main.py": "import torch\nx = torch.zeros(1).cuda()\n"}, "main.py"),
        ({"main.py": "import engine.step\n", "engine/__init__.py": "", "engine/step.py": "d = 'cuda:1'\n"}, "step.py"),
        ({"main.py": "from engine import run\n", "engine/__init__.py": "from . import step\n",
          "engine/step.py": "import torch\ntorch.cuda.synchronize()\n"}, "step.py"),
        ({"main.py": '"""Runs without cuda."""\n# no cuda here\nimport torch, transformers\n'}, None),
        ({"main.py": "import one\n", "one.py": "import main\n"}, None),
        ({"main.py": "no python\n"}, None),
    ],
)  # fmt: skip
def test_a_program_names_cuda_in_its_own_files(tmp_path, files, place):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert names_cuda(str(tmp_path / "main.py"), [], module=False) == place


def test_a_module_names_cuda_in_its_own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = Path("package")
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('read, not run')\n")
    (package / "__main__.py").write_text("from .step import f\n")
    (package / "step.py").write_text("def f(x):\n    return x.cuda()\n")
    assert names_cuda("package", [], module=True) == "step.py"
    assert names_cuda("not_there", [], module=True) is None


@pytest.mark.parametrize(
    ("end", "reason"), [("1 / 0", "the program raised ZeroDivisionError"), ("raise SystemExit(4)", "")]
)
def test_a_program_that_raises_is_reported_as_incomplete(san_source, end, reason):
    code, report, out = san_source(f"import torch\ntorch.zeros(2, device='cuda')\n{end}\n")
    assert code == (1 if reason else 4)
    assert report["incomplete"].startswith(reason) and bool(report["incomplete"]) == bool(reason)
    assert (f"gapless san: incomplete: {reason}" in out.err) == bool(reason)


def test_threads_are_something_to_the_race_detector_alone():
    for names, threads, nothing in ((["race"], 2, False), (["race"], 1, True), (["sync", "race"], 2, True)):
        detectors = Detectors(names)
        with detectors:
            started = [threading.Thread(target=int) for _ in range(threads - 1)]
            for thread in started:
                thread.start()
                thread.join()
        assert detectors.saw_nothing == nothing, (names, detectors.watched)
