"""The seam between the runners (`gapless san`, the pytest plugin) and the detectors that they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from . import threads, watch
from .options import DetectorOptions
from .race_detector import RaceDetector
from .report import CountedFinding, SyncReport
from .sync import emulating, no_sync


class Detector(Protocol):
    """One detector of a run. The runner calls `enter`, the program, `exit`, all on one thread, then `findings`.

    A detector that works by thread sees to the program's other threads itself. While it is on, regions of its kind in
    the program must record into it and not raise.
    """

    @property
    def name(self) -> str: ...

    def enter(self) -> None: ...

    def exit(self) -> None: ...

    def findings(self) -> list[CountedFinding]:
        """What was found between `enter` and `exit`."""
        ...


def _recording(thread: threading.Thread) -> AbstractContextManager[object]:
    """Give a new thread a region of its own to run in."""
    return no_sync(mode="record")


def _emulating(thread: threading.Thread) -> AbstractContextManager[object]:
    return emulating()


class SyncDetector:
    """no_sync over the whole program and every thread that it starts."""

    name = "sync"

    def __init__(self, options: DetectorOptions) -> None:
        self._options = options
        self._report = SyncReport()
        self._stack = ExitStack()

    def enter(self) -> None:
        watch.REPORT_SINKS.append(self._report)
        self._stack.callback(watch.REPORT_SINKS.remove, self._report)
        if not self._options.regions:
            self._stack.enter_context(no_sync(mode="record"))
            threads.add(_recording)
            self._stack.callback(threads.remove, _recording)

    def exit(self) -> None:
        self._stack.close()

    def findings(self) -> list[CountedFinding]:
        return self._report.entries()


DETECTORS: dict[str, Callable[[DetectorOptions], Detector]] = {"sync": SyncDetector, "race": RaceDetector}
"""The detectors by their names, as `--detect` takes them."""


class Detectors:
    """Several detectors at once, entered in order and left in reverse."""

    def __init__(self, names: list[str], options: DetectorOptions) -> None:
        """Make the named detectors. Raises ValueError for an unknown name."""
        for name in names:
            if name not in DETECTORS:
                raise ValueError(f"unknown detector {name!r}; there are {', '.join(DETECTORS)}")
        self._all = [DETECTORS[name](options) for name in names]
        self._names = names
        self._options = options
        self._stack = ExitStack()

    def __enter__(self) -> Detectors:
        self._emulate()
        for detector in self._all:
            detector.enter()
            self._stack.callback(detector.exit)
        return self

    def _emulate(self) -> None:
        """Emulate CUDA tensors in the whole program, whichever part is checked, where there is no CUDA."""
        from .emulate import emulated_cuda

        options, none_there = self._options, not torch.cuda.is_available()
        if options.emulate_cuda:
            self._stack.enter_context(emulated_cuda())
        if none_there and (options.regions or (options.emulate_cuda and "sync" not in self._names)):
            self._stack.enter_context(emulating())
            threads.add(_emulating)
            self._stack.callback(threads.remove, _emulating)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def findings(self) -> list[CountedFinding]:
        return [entry for detector in self._all for entry in detector.findings()]
