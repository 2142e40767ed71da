"""Calls the C++ compiler: no more processes at once than cores, for the processor at hand, less of it, or another.

The compiler is called directly, by torch's own flags: that needs neither ninja nor setuptools.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from gapless.base import progress
from gapless.base.host import processor_says, usable_cores

FLAGS = (
    "-std=c++20",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    # If GCC's tuning for a processor splits some chains of multiply-adds and not others, a row's bits would depend
    # on how many rows are beside it. Clang ignores this.
    "--param=avoid-fma-max-bits=0",
)
GLUE = "-O2"
"""Optimization of files that include torch or pybind11: they check arguments and call the others, and have no loops
that -O3 would help."""
NATIVE, V3, BASELINE = ("-march=native",), ("-march=x86-64-v3", "-mtune=native"), ()
V3_NEEDS = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}
COMPILE_SECONDS = 600
TICK_SECONDS = 0.5
"""Time between two moves of the line of progress while no file is done"""
COMPILES = "compiling C++ for this machine and this torch, once"
_INCLUDES = re.compile(r'^ *# *include +[<"]([^>"]+)[>"]', re.MULTILINE)
_STOPPED = ("fatal error: Killed", "fatal error: Terminated", "No space left on device", "Interrupt")
_HEAVY = ("torch/", "ATen/", "c10/", "pybind11/")


class Toolchain(NamedTuple):
    """A compiler, the processor it compiles for, and the torch and Python that it compiles against."""

    tool: str
    level: tuple[str, ...]
    """Flags for the processor"""
    headers: tuple[Path, ...]
    """Folders of torch's and Python's headers"""
    links: tuple[str, ...]
    """The linker's arguments after the objects"""


class UnfinishedError(Exception):
    """The compiler was stopped or has not ended; its sources may be sound."""


def compiler() -> str | None:
    """Return the path of the C++ compiler: what CXX names, or c++, g++, clang++."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def levels() -> list[tuple[str, ...]]:
    """Return the compiler's flags for this processor, or for the part of it that torch may use, then for less of it.

    ATEN_CPU_CAPABILITY=avx2 keeps torch, and so this, from AVX-512 that the processor has.
    """
    has = set(processor_says("flags").split())
    if is_capped():
        return [(*V3, "-mavxvnni"), V3, BASELINE] if "avx_vnni" in has else [V3, BASELINE]
    return [NATIVE, V3, BASELINE] if has >= V3_NEEDS else [NATIVE, BASELINE]


def is_capped() -> bool:
    """Return whether ATEN_CPU_CAPABILITY=avx2 keeps torch from AVX-512 that the processor has."""
    return os.environ.get("ATEN_CPU_CAPABILITY") == "avx2" and "avx512f" in processor_says("flags").split()


def aim() -> str:
    """Return the target: the first level, and the reason if it is less than this processor has."""
    first = levels()[0]
    return shown(first) + ("" if first == NATIVE else ", since ATEN_CPU_CAPABILITY keeps torch from AVX-512")


def shown(level: tuple[str, ...]) -> str:
    """Return the name of a level."""
    return " ".join(level) or f"the least of {platform.machine()}"


def here(tool: str, level: tuple[str, ...]) -> Toolchain:
    """Return the target of libraries that this process can load."""
    return Toolchain(tool, level, headers(sysconfig.get_paths()["include"]), _link_flags())


def headers(*pythons: str) -> tuple[Path, ...]:
    """Return the folders of torch's and Python's headers."""
    torchs = Path(torch.__file__).parent / "include"
    return torchs, torchs / "torch" / "csrc" / "api" / "include", *map(Path, pythons)


def make(chain: Toolchain, name: str, sources: Sequence[Path], library: Path) -> str:
    """Compile the sources and link them into `library`, with all temporary files beside it; return what went
    wrong, if anything did. Raises UnfinishedError if a compiler did not come to its end."""
    units = _units(sources, library.parent)
    flags = [*_torch_flags(name, chain.headers), *chain.level]
    objects = [library.parent / f"{unit.stem}.o" for unit, _ in units]
    commands = [
        [chain.tool, *FLAGS, *optimized, *flags, "-c", str(unit), "-o", str(made)]
        for (unit, optimized), made in zip(units, objects, strict=True)
    ]
    with _FILES.more(len(commands)):
        failed = _run(commands)
    return failed or _run([[chain.tool, "-shared", *map(str, objects), *chain.links, "-o", str(library)]])


def _units(sources: Sequence[Path], scratch: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the units to compile with their own flags; the slowest comes first.

    Files that include torch or pybind11 are one unit: to parse those takes several times longer than all that they say
    themselves.
    """
    files = [source for source in sources if source.suffix == ".cpp"]
    ours = {source.name: source.read_text() for source in sources}
    glue = [file for file in files if _is_heavy(file.name, ours)]
    rest = sorted((file for file in files if file not in glue), key=lambda file: file.stat().st_size, reverse=True)
    units: list[tuple[Path, tuple[str, ...]]] = [(file, ()) for file in rest]
    if glue:
        together = scratch / "torch_glue.cpp"
        together.write_text("".join(f'#include "{file.resolve()}"\n' for file in glue))
        units.insert(0, (together, (GLUE,)))
    return units


def _is_heavy(name: str, ours: dict[str, str]) -> bool:
    """Whether the file, or one of ours that it includes, includes torch or pybind11."""
    included = _INCLUDES.findall(ours.get(name, ""))
    return any(other.startswith(_HEAVY) or (other != name and _is_heavy(other, ours)) for other in included)


def _torch_flags(name: str, folders: Sequence[Path]) -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    defines = [f"-DTORCH_EXTENSION_NAME={name}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-DNDEBUG"]
    return [*defines, *(f"-isystem{folder}" for folder in folders)]


def _link_flags() -> tuple[str, ...]:
    home = Path(torch.__file__).parent
    # The OpenMP that torch brought along: a second one in the process would be a second pool of threads.
    own = [*(home / "lib").glob("libgomp*.so*"), *(home.parent / "torch.libs").glob("libgomp*.so*")]
    openmp = str(own[0]) if own else "-fopenmp"
    return f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", openmp


def _run(commands: Sequence[Sequence[str]]) -> str:
    """Run the commands in their order, one a core; return the output of the first that failed."""
    failed = threading.Event()

    def run(command: Sequence[str]) -> str:
        with _TURNS.one(commands.index(command)):
            if failed.is_set():
                return ""
            try:
                reason = _run_one(command)
            except UnfinishedError:
                failed.set()
                raise
            _FILES.tick(int("-c" in command))  # not the linked file
            if reason:
                failed.set()
            return reason

    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        runs = [pool.submit(run, command) for command in commands]
        while wait(runs, TICK_SECONDS).not_done:
            _FILES.tick()
        return next(filter(None, (one.result() for one in runs)), "")


def _run_one(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=COMPILE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnfinishedError(f"{command[0]} has not ended after {COMPILE_SECONDS} s") from None
    if not done.returncode:
        return ""
    if done.returncode < 0 or any(word in done.stdout for word in _STOPPED):
        raise UnfinishedError(f"{command[0]} was stopped: {done.stdout.strip() or f'signal {-done.returncode}'}")
    errors = [line for line in done.stdout.splitlines() if "error" in line] or done.stdout.splitlines()[-3:]
    return f"{shlex.join(command[:1])} failed: {' | '.join(errors[:3]) or done.returncode}"


class _Files:
    """Counts the files of all libraries that are compiled, for one line of progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libraries = self._done = self._total = 0
        self._began = self._lined = 0.0

    @contextmanager
    def more(self, files: int) -> Iterator[None]:
        """Count this library's files while they are compiled; the first of several libraries begins the count."""
        with self._lock:
            if not self._libraries:
                self._done = self._total = 0
                self._began = time.monotonic()
                self._lined = self._began - progress.LINE_SECONDS
            self._libraries += 1
            self._total += files
        self.tick()
        try:
            yield
        finally:
            with self._lock:
                self._libraries -= 1

    def tick(self, done: int = 0) -> None:
        with self._lock:
            if not self._libraries:  # it is linked
                return
            self._done += done
            now = time.monotonic()
            line = now - self._lined >= progress.LINE_SECONDS
            self._lined = now if line else self._lined
            phase = progress.Phase(COMPILES, self._done, self._total, "files", now - self._began, line)
        progress.show(phase)


class _Turns:
    """Lets as many compile at once as there are cores, of all libraries together, the lowest place first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._running = 0

    @contextmanager
    def one(self, place: int) -> Iterator[None]:
        with self._changed:
            self._waiting.append(place)
            self._changed.wait_for(lambda: self._running < usable_cores() and place == min(self._waiting))
            self._waiting.remove(place)
            self._running += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


_TURNS = _Turns()
_FILES = _Files()
