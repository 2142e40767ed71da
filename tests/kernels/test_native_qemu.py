"""The C++ kernels on processors that are not here, which qemu plays: ARM with and without its newer instructions, and
x86-64 without AVX-512 and without AVX. An instruction that such a processor lacks ends the program. `make qemu` runs
it: each processor takes a build of its own, and qemu some minutes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from gapless.device import compiling
from gapless.kernels import native

COMPILE_SECONDS, RUN_SECONDS = 900, 600


class Machine(NamedTuple):
    compiler: str | None
    """None: the one that builds here"""
    flags: str
    emulator: str
    processor: str
    says: str
    """The vector unit"""


MACHINES = {
    "arm": Machine("aarch64-linux-gnu-g++", "-march=armv8-a", "qemu-aarch64", "cortex-a57", "neon"),
    "arm_newer": Machine(
        "aarch64-linux-gnu-g++", "-march=armv8.2-a+dotprod+bf16+i8mm", "qemu-aarch64", "max", "neon, pairs"
    ),
    "avx2": Machine(None, "-march=x86-64-v3", "qemu-x86_64", "Haswell-noTSX", "avx2"),
    "sse2": Machine(None, "-march=x86-64", "qemu-x86_64", "Nehalem", "sse2"),
}


def tool(name: str, package: str) -> str:
    found = shutil.which(name) or shutil.which(f"{name}-static")
    if found is None:
        pytest.skip(f"no {name} here: apt-get install {package}")
    return found


@pytest.mark.process
@pytest.mark.skipif(not os.environ.get("GAPLESS_QEMU"), reason="takes minutes a processor: make qemu")
@pytest.mark.timeout(COMPILE_SECONDS + RUN_SECONDS)
@pytest.mark.parametrize("name", MACHINES)
def test_kernels_are_right_on_a_processor_that_is_not_here(tmp_path: Path, name: str) -> None:
    machine = MACHINES[name]
    emulator = tool(machine.emulator, "qemu-user")
    if machine.compiler is None:
        if platform.machine() != "x86_64":
            pytest.skip("the compiler here does not compile for x86-64")
        compiler = compiling.compiler() or pytest.skip("there is no C++ compiler")
    else:
        compiler = tool(machine.compiler, "g++-aarch64-linux-gnu")
    sources = [path for path in native.SOURCES if path.suffix == ".cpp" and not path.stem.startswith("ops_")]
    program, folder = tmp_path / "program", native.SOURCES[0].parent
    own = Path(__file__).with_name("kernels_alone.cpp")
    flags = [*compiling.FLAGS, *machine.flags.split(), f"-I{folder}", "-static"]
    made = subprocess.run(
        [compiler, *flags, own, *sources, "-o", program], capture_output=True, text=True, timeout=COMPILE_SECONDS
    )
    assert made.returncode == 0, made.stderr[-2000:]
    ran = subprocess.run(
        [emulator, "-cpu", machine.processor, program], capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert ran.returncode == 0, f"status {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert ran.stdout.splitlines()[0] == machine.says
