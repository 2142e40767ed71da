"""examples/sanitize: the steps of its CI pass as they stand, and fail where its code waits for the device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from bare_san import ROOT, environment_with, wheel_made_in

PROJECT = ROOT / "examples" / "sanitize"
WORKFLOW = PROJECT / ".github" / "workflows" / "sanitize.yml"
FLOW = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
STEPS = FLOW["jobs"]["sanitize"]["steps"]
INSTALLS = [step["run"] for step in STEPS if step.get("run", "").startswith("pip ")]
COMMANDS = [step["run"] for step in STEPS if "run" in step and step["run"] not in INSTALLS]
LINT, TESTS, PROGRAM = COMMANDS
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """An environment as the steps of the installation leave it."""
    return environment_with(wheel_made_in(tmp_path_factory.mktemp("clone")), tmp_path_factory.mktemp("bare"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy outside of this repository, as a stranger has it."""
    return Path(shutil.copytree(PROJECT, tmp_path / "draft", ignore=shutil.ignore_patterns("__pycache__")))


def run(bare: Path, project: Path, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a step as the CI does, by a shell that stops at the first error."""
    path = f"{bare}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(project), "OMP_NUM_THREADS": "1", **FLOW["env"], **variables}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
        cwd=project, env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_the_ci_installs_the_cpu_build_and_uploads_what_its_steps_write():
    assert INSTALLS == [
        "pip install torch --index-url https://download.pytorch.org/whl/cpu", 'pip install numpy pytest "$GAPLESS_SAN"',
    ]  # fmt: skip
    uploads = [step["with"] for step in STEPS if "upload-sarif" in step.get("uses", "")]
    assert [upload["sarif_file"] for upload in uploads] == ["lint.sarif", "tests.sarif", "program.sarif"]
    assert all(f"{upload['category']}.sarif" in command for upload, command in zip(uploads, COMMANDS, strict=True))


@pytest.mark.process
def test_the_project_is_clean(bare, project):
    for command in COMMANDS:
        done = run(bare, project, command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 reports at 0 sites" in done.stdout + done.stderr
    assert json.loads((project / "program.sarif").read_text())["runs"][0]["results"][0]


@pytest.mark.process
def test_a_line_that_waits_fails_the_job(bare, project):
    source = project / "draft.py"
    good, bad = "    return torch.where(kept, drafted, 0), kept.sum(1)", "    return drafted[kept], kept.sum(1)"
    text = source.read_text()
    assert text.count(good) == 1
    source.write_text(text.replace(good, bad))
    line = text[: text.index(good)].count("\n") + 1
    done = run(bare, project, TESTS)
    assert done.returncode == 1 and f"x draft.py:{line}: mask-index\n" in done.stdout, done.stdout
    done = run(bare, project, PROGRAM)
    assert done.returncode == 1 and f"draft.py:{line}: mask-index" in done.stderr, done.stderr
    for file in ("tests.sarif", "program.sarif"):
        results = json.loads((project / file).read_text())["runs"][0]["results"]
        new = [one for one in results if one.get("baselineState") != "unchanged" and "suppressions" not in one]
        assert [one["ruleId"] for one in new] == ["mask-index"]
    # Once it is known, it does not fail the job.
    assert run(bare, project, "gapless-san --json san-base.json -- python main.py").returncode == 1
    assert run(bare, project, PROGRAM).returncode == 0
    done = run(bare, project, f"{TESTS} --gapless-san-diff san-base.json")
    assert "0 reports at 0 sites, 0 sites allowed; 1 sites known from san-base.json" in done.stdout, done.stdout


TRAIN = """
import torch

def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()

def main():
    model = torch.nn.Linear(4, 4, device="cuda")
    losses = [step(model, torch.ones(2, 4, device="cuda")) for _ in range(3)]
    print(torch.stack(losses).tolist())  # san: ok(at the end)

if __name__ == "__main__":
    main()
"""

TEST = """
import pytest, torch, train

@pytest.fixture
def model():
    return torch.nn.Linear(4, 4, device="cuda")

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_step(model):
    assert train.step(model, torch.ones(2, 4, device="cuda")) >= 0
"""


@pytest.mark.process
def test_the_workflow_runs_in_a_repository_that_was_empty(bare, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True, timeout=60)
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    shutil.copy(WORKFLOW, tmp_path / ".github" / "workflows")
    for command in COMMANDS:
        assert run(bare, tmp_path, command).returncode in (0, 2, 5), "nothing is there to run"
    (tmp_path / "tests").mkdir()
    for name, text in (("train.py", TRAIN), ("tests/test_train.py", TEST), ("conftest.py", "")):
        (tmp_path / name).write_text(text)
    for command in COMMANDS:
        done = run(bare, tmp_path, command, PROGRAM="train.py", SOURCES="train.py")
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "train.py").write_text(TRAIN.replace("loss.detach()", "loss.item()"))
    for command in (TESTS, PROGRAM):
        done = run(bare, tmp_path, command, PROGRAM="train.py", SOURCES="train.py")
        assert done.returncode != 0 and "train.py:7: host-read" in done.stdout + done.stderr, done.stdout + done.stderr
