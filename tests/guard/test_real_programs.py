"""`gapless san` finds in real programs and engines' loops what their comments say, line by line, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "real"
ROOT = HERE.parents[2]
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated"),
]

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


@pytest.mark.parametrize("name", ["overlapped_engine.py", "nano_engine.py", "generate.py", "accelerated.py"])
def test_a_program_is_reported_where_its_comments_say(name, tmp_path):
    assert by_line(found_in(name, tmp_path), HERE / name) == marks_of(HERE / name)


def own_calls(report: dict[str, object], name: str, mark: str) -> dict[str, Counter[tuple[str, str]]]:
    """Take the findings in a library below the line with this comment: rule and function, counted, by kind."""
    path = HERE / name
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.endswith(f"# {mark}"))
    findings = report["findings"]
    assert isinstance(findings, list)
    taken: dict[str, Counter[tuple[str, str]]] = {"loop": Counter(), "once": Counter()}
    for entry in [entry for entry in findings if entry["line"] == line]:
        kind = "loop" if entry["in_loop"] and entry["count"] > 1 else "once"
        taken[kind][entry["rule"], entry["stack"][0]["function"].rpartition(".")[2]] += entry["count"]
        findings.remove(entry)
    return taken


def test_lightnings_own_waits_are_named_by_the_line_of_the_fit(tmp_path):
    """The loss scaler reads once a step, a checkpoint is copied once an epoch; each worker is watched too."""
    report = found_in("lightning_fit.py", tmp_path)
    taken = own_calls(report, "lightning_fit.py", "fit")
    assert by_line(report, HERE / "lightning_fit.py") == marks_of(HERE / "lightning_fit.py")
    assert taken["loop"] == {
        ("host-read", "optimizer_step"): 8, ("host-read", "state_dict"): 4, ("copy-to-host", "batch_to"): 4,
        ("host-read", "has_len_all_ranks"): 4, ("list-to-device", "has_len_all_ranks"): 2,
        ("copy-to-host", "_atomic_save"): 12,
    }  # fmt: skip
    assert taken["once"] == {
        ("upload", "to"): 2, ("copy-to-host", "cpu"): 4, ("empty-cache", "_clear_cuda_memory"): 2,
        ("empty-cache", "resume_end"): 1,
    }  # fmt: skip
    assert report["watched"]["children"] == 4


def test_continuous_batching_waits_each_step_and_computes_before_its_inputs_are_ordered(tmp_path):
    """Its loop is the library's own. Inputs are written on the default stream, and read on another that waits for no
    event of it."""
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
