"""`no_race()`: inside it, two accesses to the same memory that nothing orders are an error."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from gapless.guard import observe
from gapless.guard.race_buffers import extent_of
from gapless.guard.race_checker import RaceChecker
from gapless.guard.race_cuda import CudaWatch
from gapless.guard.race_device import DeviceWatch, Scheduled
from gapless.guard.race_mode import RaceMode
from gapless.guard.race_patches import Patches
from gapless.guard.race_report import READ, Finding, RaceError
from gapless.guard.race_threads import ThreadWatch

__all__ = ["Finding", "RaceChecker", "RaceError", "no_race"]

_turn = threading.Lock()


class no_race(ContextDecorator):
    """A happens-before checker over streams, fences and host threads. One at a time in a process.

    `with no_race() as checker:` gives a `RaceChecker`, with which buffers are registered; `track="all"` watches every
    tensor, which costs more. `mode` "raise" raises RaceError: at once for what a host thread does, at the host's next
    launch, fence or at the end for what a program on a stream does; "record" only collects `checker.findings`.
    `threads="one"` takes all host threads as ordered, for programs that order them by means that are not seen.
    Threads must be started inside it to be watched.
    """

    def __init__(
        self,
        mode: Literal["raise", "record"] = "raise",
        *,
        track: Literal["registered", "all"] = "registered",
        threads: Literal["each", "one"] = "each",
    ) -> None:
        self._options = (mode == "raise", track == "all", threads == "one")

    def __enter__(self) -> RaceChecker:
        if not _turn.acquire(blocking=False):
            raise RuntimeError("no_race() is active already: one checker at a time")
        checker = self._checker = RaceChecker(*self._options, floor=Scheduled.__call__.__code__)
        self._threads, self._patches = ThreadWatch(checker), Patches()
        self._mode = RaceMode(checker)
        if torch.cuda.is_available():
            checker.cuda = CudaWatch(checker)
            checker.cuda.install()
            checker.follows_results = True
        for name in ("numpy", "tolist"):
            self._patches.wrap(Tensor, name, self._read)
        self._threads.install()
        self._device = DeviceWatch(checker)
        observe.add(self._device)
        checker.active = True
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return checker

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        checker = self._checker
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        checker.active = False
        observe.remove(self._device)
        self._threads.remove()
        self._patches.undo()
        if checker.cuda is not None:
            checker.cuda.remove()
        _turn.release()
        if self._options[0] and error is None:
            checker.check()

    def _read(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        # These read memory without an operator.
        extent = extent_of(tensor) if tensor.device.type == "cpu" else None
        if extent is not None:
            self._checker.reach(extent, READ)
        return original(tensor, *args, **kwargs)
