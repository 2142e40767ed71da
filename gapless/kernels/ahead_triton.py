"""Compiles Triton's kernels on all cores before their first launch.

Triton compiles a kernel at its first launch, which waits: one after another they take half a minute. Kernels missing in
Triton's cache are compiled by forked processes, since threads would wait for each other: Triton reads a kernel's source
under the interpreter's lock. Threads then load all kernels from the cache.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from triton import AsyncCompileMode, JITFunction, knobs

from gapless.base.host import usable_cores
from gapless.device import facts
from gapless.device.record import PlainMode

log = logging.getLogger("gapless.kernels")

MOST_WORKERS = 16
"""Most compiling processes, and loading threads"""
FORKED_SECONDS = 60.0
"""Time limit of the processes; threads here compile the rest."""
REAP_SECONDS = 1.0
WITNESSES = 3
"""Kernels looked up to see whether Triton's cache is filled."""
COMPILING_SWITCH_SECONDS = 5e-3


@contextmanager
def ahead() -> Iterator[None]:
    """Let launches of this thread compile and load their kernels inside, and run nothing; the end waits for that.

    Unwritten tensors hold zeros, so that no index is out of bounds. A kernel that fails to compile raises at its first
    launch.
    """
    with ThreadPoolExecutor(min(MOST_WORKERS, usable_cores()), "compile") as threads, _long_turns():
        loader = Loader(threads)
        with AsyncCompileMode(loader, ignore_errors=True):
            try:
                with _launching_nothing(), Zeros():
                    yield
            finally:
                loader.start()


class Loader:
    """The part of an executor that Triton uses. A kernel with a done future is on the device too.

    Nothing begins before `start`: else the submitting thread would wait for the interpreter's lock at every turn.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._device = facts.current()
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, compiles: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, compiles))
        return future

    def start(self) -> None:
        try:
            fill_cache([compiles for _, compiles in self._waiting])
        except BaseException as error:  # an interrupt: the end of AsyncCompileMode waits for every future
            for future, _ in self._waiting:
                future.set_exception(RuntimeError(f"not compiled: {error!r}"))
            raise
        for future, compiles in self._waiting:
            self._threads.submit(self._run, future, compiles)

    def _run(self, future: Future[Any], compiles: Callable[[], Any]) -> None:
        try:
            future.set_result(self.load(compiles))
        except BaseException as error:
            future.set_exception(error)

    def load(self, compiles: Callable[[], Any]) -> Any:
        facts.make_current(self._device)
        kernel = compiles()
        kernel.run  # noqa: B018  (reading it builds the launcher, and loads the kernel)
        return kernel


def fill_cache(jobs: list[Callable[[], Any]]) -> None:
    """Let forked processes compile the kernels missing in Triton's cache, unless it has the looked up ones.

    They have no other thread, use no device, and run only the compiler. A kernel that they miss is compiled when it is
    loaded.
    """
    if all(map(is_cached, jobs[:: max(1, len(jobs) // WITNESSES)])):
        return
    children: list[int] = []
    end = time.monotonic() + FORKED_SECONDS
    try:
        # The machine may refuse pipes or processes. A child forked while another thread held a lock hangs until
        # FORKED_SECONDS.
        with warnings.catch_warnings(), suppress(OSError):
            warnings.simplefilter("ignore", DeprecationWarning)
            fork_all(jobs, children)
        for child in tuple(children):
            while runs(child) and time.monotonic() < end:
                time.sleep(5e-3)
            if time.monotonic() >= end:
                log.warning("processes have compiled kernels for %g s and are ended", FORKED_SECONDS)
                break
            children.remove(child)
    finally:
        _end(children)


def fork_all(jobs: list[Callable[[], Any]], children: list[int]) -> None:
    """Fork processes that share the jobs, and add them to `children`."""
    todo, write = os.pipe()
    try:
        os.write(write, bytes(range(min(256, len(jobs)))))
        os.close(write)
        for _ in range(min(MOST_WORKERS, usable_cores(), len(jobs))):
            children.append(forked_worker(todo, jobs))  # noqa: PERF401 (a refused fork keeps the earlier ones)
    finally:
        os.close(todo)


def forked_worker(todo: int, jobs: list[Callable[[], Any]]) -> int:
    """Fork a process that reads numbers of jobs from the pipe `todo`, a byte each, and runs the jobs."""
    child = os.fork()
    if child:
        return child
    try:
        _leave_parent(todo)
        while turn := os.read(todo, 1):
            for job in jobs[turn[0] :: 256]:
                with suppress(Exception):
                    job()
    finally:
        os._exit(0)


def _leave_parent(kept: int) -> None:
    """Close the parent's files, sockets, pipes and devices, so that others see the parent's end while this process
    runs."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != kept:
            with suppress(OSError):  # the list's own is closed by now
                os.close(descriptor)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, FORKED_SECONDS)


def runs(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) == (0, 0)
    except ChildProcessError:  # a program that ignores SIGCHLD has nothing to wait for
        return False


def _end(children: list[int]) -> None:
    """Kill these processes, and wait a moment for each."""
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        end = time.monotonic() + REAP_SECONDS
        while runs(child) and time.monotonic() < end:
            time.sleep(5e-3)


def is_cached(compiles: Callable[[], Any]) -> bool:
    """Compile a kernel, and return whether it came from Triton's cache."""
    hits: list[bool] = []
    before, knobs.compilation.listener = knobs.compilation.listener, lambda **what: hits.append(what["cache_hit"])
    try:
        with suppress(Exception):
            compiles()
    finally:
        knobs.compilation.listener = before
    return hits == [True]


@contextmanager
def _long_turns() -> Iterator[None]:
    """Let computing threads hold the interpreter's lock for Python's default interval: a running engine's short one
    makes them twice as slow."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(COMPILING_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Make `kernel[grid](...)` on this thread mean `kernel.warmup(..., grid=grid)`."""
    here, launch = threading.get_ident(), JITFunction.__getitem__

    def warm(kernel: Any, grid: Any) -> Any:
        if threading.get_ident() != here:
            return launch(kernel, grid)
        return functools.partial(kernel.run, grid=grid, warmup=True)

    JITFunction.__getitem__ = warm
    try:
        yield
    finally:
        del JITFunction.__getitem__


class Zeros(PlainMode):
    """Fills tensors with zeros if they are made without contents, or by an operator of this package."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace == "gapless" or "empty" in func._schema.name:
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(tensor, Tensor):
                    tensor.zero_()
        return made
