"""Runs a file of tests in Triton's interpreter: in a process of its own, since Triton reads the switch at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(name: str, *options: str, timeout: float = 280) -> None:
    """Fails as `tests/kernels/interpreted/NAME.py` fails, in its words."""
    pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreted" / f"{name}.py"), "--noconftest", "-x"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "quick_interpreter", *options]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    print(done.stdout[-500:])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
