"""The shared memory's C++ by itself: here, and on ARM, which qemu plays (`make qemu`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from gapless.comm.shared import COMM_SOURCES
from gapless.device import compiling

FOLDERS = {path.parent for path in COMM_SOURCES}
ON_ARM = "aarch64-linux-gnu-g++", "qemu-aarch64"


def run(compiler: str, folder: Path, *emulator: str) -> str:
    """Compile the program, run it, and return its output."""
    own = [path for path in COMM_SOURCES if path.suffix == ".cpp" and path.stem != "ops"]
    flags = [*compiling.FLAGS, *(f"-I{one}" for one in FOLDERS), "-pthread", "-static"]
    command = [compiler, *flags, str(Path(__file__).with_name("ranks_alone.cpp")), *map(str, own)]
    subprocess.run([*command, "-o", "program"], cwd=folder, check=True, timeout=280)
    done = subprocess.run([*emulator, "./program"], cwd=folder, capture_output=True, text=True, timeout=280)
    return done.stdout + done.stderr


@pytest.mark.process
def test_ranks_without_python_send_100_000_orders_and_add(tmp_path: Path) -> None:
    compiler = compiling.compiler() or pytest.skip("there is no C++ compiler")
    assert run(compiler, tmp_path) == "all right\n"


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.environ.get("GAPLESS_QEMU"), reason="takes a minute: make qemu")
def test_ranks_on_arm_send_100_000_orders_and_add(tmp_path: Path) -> None:
    for tool, package in zip(ON_ARM, ("g++-aarch64-linux-gnu", "qemu-user"), strict=True):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here: apt-get install {package}")
    assert run(ON_ARM[0], tmp_path, ON_ARM[1]) == "all right\n"
