"""examples/sanitize: the commands of its CI pass as they stand, and both fail where its code waits for the device."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "examples" / "sanitize"
STEPS = re.findall(r"- run: (.*)", (PROJECT / ".github" / "workflows" / "sanitize.yml").read_text())
COMMANDS = [step.split() for step in STEPS if not step.startswith("pip")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy outside of this repository, as a stranger has it."""
    return Path(shutil.copytree(PROJECT, tmp_path / "draft", ignore=shutil.ignore_patterns("__pycache__")))


def run(project: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_the_ci_runs_the_tests_and_the_program():
    assert [command[0] for command in COMMANDS] == ["pytest", "gapless"]


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_project_is_clean(project, command):
    done = run(project, command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gapless san: 0 reports" in done.stdout + done.stderr
    assert command[0] == "pytest" or json.loads((project / "san.sarif").read_text())["runs"][0]["results"][0]


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_line_that_waits_fails_the_job(project, command):
    source = project / "draft.py"
    good, bad = "    return torch.where(kept, drafted, 0), kept.sum(1)", "    return drafted[kept], kept.sum(1)"
    text = source.read_text()
    assert text.count(good) == 1
    source.write_text(text.replace(good, bad))
    line = text[: text.index(good)].count("\n") + 1
    done = run(project, command)
    assert done.returncode == 1
    assert f"draft.py:{line}: mask-index" in done.stdout + done.stderr
    if command[0] == "pytest":
        assert f"x draft.py:{line}: mask-index\n" in done.stdout, "the summary names the site"
        return
    results = json.loads((project / "san.sarif").read_text())["runs"][0]["results"]
    new = [result for result in results if result["baselineState"] == "new" and "suppressions" not in result]
    assert [result["ruleId"] for result in new] == ["mask-index"]
    # Once it is known, it does not fail the job.
    known = [word if word != "--diff" else "--json" for word in command[: command.index("--sarif")]]
    assert run(project, [*known, *command[command.index("--") :]]).returncode == 1
    assert run(project, command).returncode == 0
