"""tests/guard/kinds under all detectors: a bad program gives the findings that its comments name, its good twin none.

`# finds: RULE` ends a line at which that rule is reported; a race is reported at its later access. Programs whose first
lines have `# runs: process` get a process of their own, and `# args: WORDS` gives arguments.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "kinds"
ROOT = HERE.parents[2]
BAD = sorted(HERE.rglob("*_bad.py"))
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")

Found = set[tuple[int, str]]


def marked(path: Path) -> Found:
    """Return the lines of a program and the rules that its comments name there."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return {(number, rule) for number, line in lines for rule in _rules(line)}


def _rules(line: str) -> list[str]:
    found = re.search(r"# finds: ([\w ,-]+)$", line)
    return re.split(r",\s*", found[1]) if found else []


def header(path: Path, name: str) -> str:
    """Return what a comment `# NAME: ...` of a program says, or nothing."""
    found = re.search(rf"^# {name}: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def in_process(path: Path, folder: Path) -> tuple[int, dict[str, object], str]:
    """Run a program under san in a process of its own; returns its exit code, its report and what it printed."""
    out = folder / "report.json"
    command = [sys.executable, "-m", "gapless.guard.run", "--device-tensors", "cuda", "--json", str(out), str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *header(path, "args").split()], cwd=folder, env=env, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text(encoding="utf-8")), done.stdout + done.stderr


@pytest.fixture
def run(san_file, tmp_path):
    def started(path: Path):
        if header(path, "runs") == "process":
            return in_process(path, tmp_path)
        code, report, out = san_file(path, "--device-tensors", "cuda", args=tuple(header(path, "args").split()))
        return code, report, out.out + out.err

    return started


def programs() -> list[object]:
    """Return the bad programs, those with a process of their own marked so."""
    marks = {path: [pytest.mark.process] if header(path, "runs") == "process" else [] for path in BAD}
    return [pytest.param(path, id=path.relative_to(HERE).as_posix(), marks=marks[path]) for path in BAD]


def test_every_bad_program_is_marked_and_has_a_twin():
    assert BAD
    for path in BAD:
        assert marked(path), path
        assert not marked(path.with_name(path.name.replace("_bad", "_good"))), path


@pytest.mark.parametrize("path", programs())
def test_the_bad_program_gives_what_its_comments_name(run, path):
    code, report, said = run(path)
    assert not report["incomplete"], said
    found = {(entry["line"], entry["rule"]) for entry in report["findings"]}
    assert (code, found) == (1, marked(path)), said
    assert {entry["file"] for entry in report["findings"]} == {str(path)}, said


@pytest.mark.parametrize("path", programs())
def test_the_good_twin_gives_no_report(run, path):
    code, report, said = run(path.with_name(path.name.replace("_bad", "_good")))
    assert (code, report["reports"], report["incomplete"]) == (0, 0, ""), said
