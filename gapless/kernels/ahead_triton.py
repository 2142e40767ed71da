"""Compiling Triton's kernels on all cores before anything launches them.

Triton compiles a kernel at its first launch, while the launch waits: one after another they take half a minute. Its
passes and ptxas do not need the interpreter's lock, so threads compile side by side.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from triton import AsyncCompileMode, JITFunction

from gapless.base.host import usable_cores
from gapless.device import facts
from gapless.guard.modes import PlainMode

MOST_THREADS = 16
"""More would wait for the interpreter's lock, which each holds while it reads a kernel's source."""
SWITCH_SECONDS = 5e-3


@contextmanager
def ahead() -> Iterator[None]:
    """Inside, launches of this thread have their kernels compiled and loaded, and run nothing; the end waits for that.

    What operators leave unwritten is zeros, so that no index is out of bounds. A kernel that fails is left to fail at
    its first launch.
    """
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), "compile") as threads, _long_turns():
        loader = _Loader(threads)
        with AsyncCompileMode(loader, ignore_errors=True):
            try:
                with _launching_nothing(), _Zeros():
                    yield
            finally:
                loader.start()


class _Loader:
    """Implements the part of an executor that Triton uses. A kernel whose future is done is on the device too.

    Nothing begins before `start`: what hands the kernels in would have to wait for the lock at every turn.
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
        for future, compiles in self._waiting:
            self._threads.submit(self._run, future, compiles)

    def _run(self, future: Future[Any], compiles: Callable[[], Any]) -> None:
        try:
            future.set_result(self._load(compiles))
        except BaseException as error:
            future.set_exception(error)

    def _load(self, compiles: Callable[[], Any]) -> Any:
        facts.make_current(self._device)
        kernel = compiles()
        kernel.run  # noqa: B018  (reading it builds the launcher, and loads the kernel)
        return kernel


@contextmanager
def _long_turns() -> Iterator[None]:
    """Threads that all compute hold the interpreter's lock for as long as Python lets them by itself: the short turns
    of a running engine make them twice as slow."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """`kernel[grid](...)` on this thread is `kernel.warmup(..., grid=grid)`."""
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


class _Zeros(PlainMode):
    """Fills with zeros what is made without contents, or by an operator of ours."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace == "gapless" or "empty" in func._schema.name:
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(tensor, Tensor):
                    tensor.zero_()
        return made
