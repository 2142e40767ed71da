"""Builds gapless's wheel with its C++ compiled for levels of processors and versions of Python, into dist/.

It is compiled against the torch that is installed here, and the wheel asks for that minor version. Another machine's
needs its cross-compiler: Debian's g++-aarch64-linux-gnu for aarch64.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from gapless.base.progress import starting
from gapless.comm import shared
from gapless.device import compiling, cpu_native, prebuilt
from gapless.kernels import native
from gapless.loop import mask_threads

ROOT = Path(__file__).resolve().parents[1]
PACKED = ("pyproject.toml", "README.md", "LICENSE")
REQUIRED = '"torch>=2.11,<2.16"'
"""The requirement of pyproject.toml that the wheel narrows to the torch its C++ is compiled for"""
TORCH, OF_PYTHON = ("c10", "torch_cpu"), ("torch", "torch_python")
ASKS = "import sys, sysconfig as s; print(sys.implementation.cache_tag + sys.abiflags, s.get_paths()['include'])"

BUILDS = "from setuptools.build_meta import build_wheel; build_wheel('.', {})"


class Job(NamedTuple):
    """A library of the wheel."""

    file: str
    name: str
    sources: Sequence[Path]
    target: compiling.Toolchain


def jobs(machine: str, pythons: Sequence[str], tool: str, stubs: Path) -> Iterator[Job]:
    """Kernels and the ranks' sums for each level; the extensions, which compute nothing, for the least, by Python."""
    release = prebuilt.minor(torch.__version__)
    if not release:
        raise SystemExit(f"torch {torch.__version__} is no release: its C++ is no other build's")
    variants = [variant for variant in prebuilt.VARIANTS if variant.machine == machine]
    links = ("-s", f"-L{stubs}", "-Wl,--no-as-needed", *(f"-l{name}" for name in TORCH))
    for variant in variants:
        target = compiling.Toolchain(tool, variant.flags, compiling.headers(), links)
        for name, sources in ((native.NAME, native.SOURCES), (shared.COMM_NAME, shared.COMM_SOURCES)):
            yield Job(prebuilt.file_name(name, release, variant), name, sources, target)
    links += tuple(f"-l{name}" for name in OF_PYTHON)
    said = [subprocess.run([python, "-c", ASKS], capture_output=True, text=True, check=True) for python in pythons]
    for tag, headers in dict(one.stdout.split(maxsplit=1) for one in said).items():
        target = compiling.Toolchain(tool, variants[-1].flags, compiling.headers(headers.strip()), links)
        for name, sources in (
            (cpu_native.STREAM_NAME, cpu_native.STREAM_SOURCES),
            (mask_threads.MASKS_EXTENSION, mask_threads.MASKS_SOURCES),
        ):
            file = prebuilt.file_name(prebuilt.of_python(name, tag), release, variants[-1])
            yield Job(file, name, sources, target)


def make_stubs(tool: str, folder: Path) -> None:
    """Empty libraries with the names of torch's: a process that loads ours has loaded those, with their OpenMP."""
    for name in TORCH + OF_PYTHON:
        named = ["-x", "c++", "/dev/null", "-shared", f"-Wl,-soname,lib{name}.so", "-o", str(folder / f"lib{name}.so")]
        subprocess.run([tool, *named], check=True)


def compile_all(wanted: Sequence[Job], folder: Path) -> None:
    """Compile the libraries into `folder`, as many files at once as there are cores."""

    def one(job: Job) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / job.file
            reason = compiling.make(job.target, job.name, job.sources, made)
            if reason:
                raise SystemExit(f"{job.file}: {reason}")
            shutil.copy(made, folder)

    with starting(), ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(one, wanted))


def pack(libraries: Sequence[Path], machine: str, out: Path) -> Path:
    """Make the wheel of this checkout with these libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        stage = Path(scratch)
        shutil.copytree(ROOT / "gapless", stage / "gapless", ignore=shutil.ignore_patterns("__pycache__"))
        for name in PACKED:
            shutil.copy(ROOT / name, stage)
        inside = stage / "gapless" / "device" / prebuilt.PREBUILT.name
        inside.mkdir()
        for library in libraries:
            shutil.copy(library, inside)
        project, asked = (stage / "pyproject.toml"), prebuilt.minor(torch.__version__)
        text = project.read_text(encoding="utf-8")
        assert REQUIRED in text, f"pyproject.toml does not ask for {REQUIRED}"
        project.write_text(text.replace(REQUIRED, f'"torch=={asked}.*"'), encoding="utf-8")
        # Not manylinux: it needs the C library of the machine that builds it.
        code = BUILDS.format({"--build-option": [f"--plat-name=linux_{machine}"]})
        done = subprocess.run([sys.executable, "-c", code], cwd=stage, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"setuptools makes no wheel: {done.stderr}")
        (made,) = stage.glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), choices=sorted({v.machine for v in prebuilt.VARIANTS}))
    parser.add_argument("--python", nargs="*", default=[sys.executable], help="interpreters whose headers are here")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    here = options.machine == platform.machine()
    tool = compiling.compiler() if here else shutil.which(f"{options.machine}-linux-gnu-g++")
    if tool is None:
        raise SystemExit(f"no C++ compiler for {options.machine}")
    with tempfile.TemporaryDirectory() as scratch:
        folder, stubs = Path(scratch, "made"), Path(scratch, "stubs")
        folder.mkdir()
        stubs.mkdir()
        make_stubs(tool, stubs)
        compile_all(list(jobs(options.machine, options.python, tool, stubs)), folder)
        print(pack(sorted(folder.iterdir()), options.machine, options.out))


if __name__ == "__main__":
    main()
