"""Builds C++ sources into libraries that this process loads: on first use, kept in the user's cache folder. A wheel's
libraries are not built if they fit.

One builder for the whole package: `operators` for files that register operators with TORCH_LIBRARY, `module` for a
Python extension module. Without a compiler both give a reason instead; `outcomes` keeps the outcome of each.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from gapless.base.errors import UserError
from gapless.base.host import cache_folder
from gapless.base.progress import announce
from gapless.device import prebuilt
from gapless.device.compiling import COMPILE_SECONDS, FLAGS, GLUE, UnfinishedError, compiler, here, levels, make, shown

log = logging.getLogger("gapless.device")

CACHE_FOLDER = "native"
"""The folder of libraries in the user's cache"""
LOCK_SECONDS = 2 * COMPILE_SECONDS
"""The longest wait for a process that builds the same: it compiles, and links."""
LOCK_LOOK_SECONDS = 0.05
"""Time between two tries to take a lock that another process holds."""
KEPT_BUILDS = 8
"""Builds of one name that stay in the cache: other versions of torch, or of the sources."""


class Outcome(NamedTuple):
    library: Path | None
    reason: str
    """The reason why there is no library; empty if there is one."""
    seconds: float
    """Seconds of compilation in this process; 0 if the library came from the cache."""
    flags: str = ""
    """The compiler flags of the library."""
    fallback: str = ""
    """The reason why the library does not use all of this processor; empty if it does."""
    notes: Path | None = None
    """The file of measurements made with it"""

    @property
    def brought(self) -> bool:
        """True if the library came with the wheel."""
        return self.library is not None and self.library.parent == prebuilt.PREBUILT


outcomes: dict[str, Outcome] = {}
"""Every build that this process asked for, by name."""

modules: dict[str, ModuleType] = {}
_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
"""A lock for each name, so that builds of different names run side by side."""


def operators(name: str, sources: Sequence[Path]) -> Outcome:
    """Build `sources`, .cpp files with TORCH_LIBRARY blocks, and load them into torch.ops. Headers are listed too."""
    return _loaded(name, sources, name, torch.ops.load_library)


def module(name: str, sources: Sequence[Path], warns: bool = True) -> ModuleType | None:
    """Build `sources`, with a PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) block, and import it. None: see `outcomes`; it
    `warns` of that too."""
    _loaded(name, sources, prebuilt.of_python(name), partial(_import, name), warns)
    return modules.get(name)


def may_have(name: str) -> bool:
    """Whether operators of this name are brought along, or there is a compiler."""
    return bool(prebuilt.find(name) or compiler())


def _loaded(
    name: str, sources: Sequence[Path], brought: str, load: Callable[[str], None], warns: bool = True
) -> Outcome:
    """Load the prebuilt library of this name or else build it, once, and return the outcome. Its reason also says why a
    library cannot be loaded."""
    with _locks[name]:
        if name not in outcomes:
            outcome = _brought(brought, load) or _built(name, sources, load)
            if warns and outcome.reason and outcome.reason not in [other.reason for other in list(outcomes.values())]:
                log.warning("C++ (%s) is not there, and work on the CPU is slower: %s", name, outcome.reason)
            outcomes[name] = outcome
        return outcomes[name]


def _brought(name: str, load: Callable[[str], None]) -> Outcome | None:
    found = prebuilt.find(name)
    if found is None:
        return None
    library, variant = found
    try:
        load(str(library))
    except (OSError, ImportError, RuntimeError) as error:  # an older C library than the wheel's, say
        log.warning("C++ (%s): %s does not load, so it is built here: %s", name, library, error)
        return None
    return Outcome(library, "", 0.0, f"prebuilt for {variant.name}", "", _notes(library))


def _notes(brought: Path) -> Path:
    """Return a file of the user's for measurements with these bytes on this processor."""
    key = hashlib.sha256(_processor().encode() + brought.read_bytes()).hexdigest()[:24]
    try:
        return cache_folder(CACHE_FOLDER) / f"{brought.stem}-{key}.json"
    except (OSError, RuntimeError):  # no home: every start measures
        return brought.with_suffix(".json")


def _built(name: str, sources: Sequence[Path], load: Callable[[str], None]) -> Outcome:
    outcome = build(name, sources)
    try:
        if outcome.library is not None:
            load(str(outcome.library))
    except (OSError, ImportError, RuntimeError) as error:
        return Outcome(None, f"built, but not loaded: {error}", outcome.seconds)
    return outcome


def build(name: str, sources: Sequence[Path]) -> Outcome:
    """Return the library of these sources: from the cache, or compiled now. Two processes that want it build it once.

    Raises UserError when another process has not finished the same build in LOCK_SECONDS.
    """
    if os.name != "posix":
        return Outcome(None, f"nothing is built on {sys.platform}", 0.0)
    try:
        folder = cache_folder(CACHE_FOLDER)
        library = folder / f"{name}-{library_key(name, sources)}.so"
        if _is_whole(library):
            with suppress(OSError):  # a cache on a read-only disk serves too
                os.utime(library)
            return _made(library, 0.0)
        with only_one(folder / f"{name}.lock", LOCK_SECONDS):
            start = time.monotonic()
            reason = "" if _is_whole(library) else _compile(name, sources, library)
            seconds = time.monotonic() - start
        return Outcome(None, reason, seconds) if reason else _made(library, seconds)
    except (OSError, RuntimeError) as error:  # the second: this user has no home
        return Outcome(None, f"{type(error).__name__}: {error}: set XDG_CACHE_HOME to a folder of yours", 0.0)


def _is_whole(library: Path) -> bool:
    """Whether the file reaches the table at its end: loading a truncated library kills the process."""
    if not (library.exists() and _flags(library).exists()):
        return False
    if sys.platform != "linux":
        return True
    with library.open("rb") as file:
        head, size = file.read(64), library.stat().st_size
    if len(head) < 64 or not head.startswith(b"\x7fELF"):
        return False
    (table,), (entry, count) = struct.unpack_from("=Q", head, 40), struct.unpack_from("=2H", head, 58)
    return bool(size >= table + entry * count)


def library_key(name: str, sources: Sequence[Path]) -> str:
    """Return a hash of everything that decides what the compiler makes of the sources."""
    key = hashlib.sha256()
    abi = str(torch._C._GLIBCXX_USE_CXX11_ABI)
    for part in (name, torch.__version__, sys.version, abi, *FLAGS, GLUE, *levels()[0], _processor()):
        key.update(f"{len(part)}:{part}".encode())
    for source in sources:
        key.update(source.name.encode() + hashlib.sha256(source.read_bytes()).digest())
    return key.hexdigest()[:24]


def _processor() -> str:
    """Return everything that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _compile(name: str, sources: Sequence[Path], library: Path) -> str:
    """Make `library` for the most of this processor that compiles; returns what went wrong if no level does.

    The note beside the library then has the flags that served, and the reason why earlier ones did not.
    """
    tool = compiler()
    if tool is None:
        return "there is no C++ compiler (g++ or clang++)"
    for left in filter(Path.is_dir, library.parent.glob(f"{name}-*")):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed while it compiled: we have its lock
    reasons: list[str] = []
    for level in levels():
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{name}-") as scratch:
            made = Path(scratch) / library.name
            try:
                reason = make(here(tool, level), name, sources, made)
            except UnfinishedError as error:  # a lower level would be kept in the cache and serve from then on
                return str(error)
            if not reason:
                if reasons:
                    log.warning("C++ (%s) is not compiled for all of this processor: %s", name, reasons[0])
                _flags(library).write_text("\n".join([shown(level), *reasons]), encoding="utf-8")
                made.replace(library)
                _forget_old(name, library.parent)
                return ""
        reasons.append(f"{shown(level)}: {reason}")
    return reasons[0]


def _flags(library: Path) -> Path:
    return library.with_suffix(".flags")


def _made(library: Path, seconds: float) -> Outcome:
    """Return the outcome for an existing library."""
    flags, *reasons = _flags(library).read_text(encoding="utf-8").split("\n")
    return Outcome(library, "", seconds, flags, reasons[0] if reasons else "", library.with_suffix(".json"))


@contextmanager
def only_one(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of this file, which one process has at a time. The kernel releases it when its holder ends.

    Raises UserError, which names the holder, when the lock is not free within `seconds`; OSError as `open` does.
    """
    import fcntl  # not on every system

    end, told = time.monotonic() + seconds, False
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(_held(path, file.read(), seconds)) from None
                if not told:
                    announce(f"waiting for another process, which holds {path}")
                told = True
                time.sleep(LOCK_LOOK_SECONDS)
        file.truncate(0)
        print(f"process {os.getpid()} on {platform.node()}", end="", file=file, flush=True)
        yield


def _held(path: Path, holder: str, seconds: float) -> str:
    return (
        f"{path} is still locked by {holder or 'another process'} after {seconds:g} s: end that process if it hangs, "
        "or start again when it is ready"
    )


def _forget_old(name: str, folder: Path) -> None:
    builds = sorted(folder.glob(f"{name}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in builds[KEPT_BUILDS:]:
        path.unlink(missing_ok=True)
        for suffix in (".flags", ".json"):  # the latter: its measurements
            path.with_suffix(suffix).unlink(missing_ok=True)


def _import(name: str, library: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader(name, library)
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    modules[name] = found
