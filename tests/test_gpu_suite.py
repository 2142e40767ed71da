"""The GPU tests can be run as CONTRIBUTING.md says, on a machine that has pytest and none of its plugins."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_PLUGINS = ["-p", "no:asyncio", "-p", "no:timeout", "-p", "no:xdist", "-p", "no:hypothesispytest"]


def documented() -> list[str]:
    """The arguments of the command in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`python (-m pytest tests/gpu .*?)`", text)
    return shlex.split(command)


def collect(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments, "--collect-only", *NO_PLUGINS]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.process
def test_the_documented_command_finds_the_tests():
    done = collect(documented())
    assert done.returncode == 0, done.stdout + done.stderr
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert f"tests/gpu/{path.name}::" in done.stdout


def test_no_file_asks_for_a_gpu_by_itself():
    """Its folder does, or the cases of kernels for CUDA: the command above finds these alone."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert not [path for path in files if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
