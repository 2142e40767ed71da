"""`gapless san` finds in real programs and engines' loops what their comments say, line by line, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "real"
ROOT = HERE.parents[2]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")

Marks = dict[int, dict[str, set[str]]]


def marks_of(path: Path) -> Marks:
    """Return the rules that the comments of a program name, by line and by `loop` and `once`."""
    marks: Marks = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        _, _, comment = line.partition("  # ")
        parts = dict(re.findall(r"(loop|once): ([\w -]+)", comment))
        if parts:
            marks[number] = {kind: set(rules.split()) for kind, rules in parts.items()}
    return marks


def found_in(name: str, tmp_path: Path) -> dict[str, object]:
    """Run a program under san in a process of its own; returns the report."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "gapless.guard.run", "--json", str(out), str(HERE / name)]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **paths}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 1 and "done" in done.stdout, done.stderr
    report: dict[str, object] = json.loads(out.read_text(encoding="utf-8"))
    assert not report["incomplete"]
    return report


def by_line(report: dict[str, object], path: Path) -> Marks:
    marks: Marks = {}
    findings = report["findings"]
    assert isinstance(findings, list)
    for entry in findings:
        assert entry["file"] == str(path), entry
        kind = "loop" if entry["in_loop"] and entry["count"] > 1 else "once"
        marks.setdefault(entry["line"], {}).setdefault(kind, set()).add(entry["rule"])
    return marks


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("generate.py", "transformers"),
        ("accelerated.py", "accelerate"),
        ("nano_engine.py", "torch"),
        ("overlapped_engine.py", "torch"),
    ],
)
def test_a_program_is_reported_where_its_comments_say(name, library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    path = HERE / name
    assert by_line(found_in(name, tmp_path), path) == marks_of(path)


def test_lightnings_own_waits_are_named_by_the_line_of_the_fit(tmp_path):
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    path = HERE / "lightning_fit.py"
    found = by_line(found_in(path.name, tmp_path), path)
    fit = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# fit"))
    rules = found.pop(fit)
    assert found == marks_of(path)
    assert "upload" in rules["once"] | rules["loop"] and "host-read" in rules["loop"], rules


def test_continuous_batching_waits_each_step_and_computes_before_its_inputs_are_ordered(tmp_path):
    """Its loop is the library's own. Inputs are written on the default stream, and read on another that waits for no
    event of it."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    report = found_in("batching.py", tmp_path)
    findings = report["findings"]
    assert isinstance(findings, list)
    places = {(entry["rule"], entry["function"].rpartition(".")[2], entry["in_loop"]) for entry in findings}
    for rule, function in (
        ("list-to-device", "prepare_batch_tensors"), ("stream-wait", "retrieve_device_outputs"),
        ("host-read", "prepare_batch_update"),
    ):  # fmt: skip
        assert (rule, function, True) in places
    races = [entry for entry in findings if entry["rule"] == "race"]
    assert any("prepare_batch_tensors" in line for entry in races for line in entry["details"])
    assert all(entry["what"].startswith("stream cuda:0 0x1") for entry in races), races
