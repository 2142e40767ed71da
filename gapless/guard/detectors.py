"""The detectors that the runners (`gapless san`, the pytest plugin) put around a whole program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from . import threads, watch
from .emulate import emulated_cuda
from .race import RACE_SINKS, no_race
from .race_report import Race
from .report import CountedFinding, SyncReport
from .sync import Region, emulating, no_sync

Detector = Callable[[SyncReport, bool], AbstractContextManager[None]]
"""Checks the program inside and all threads that it starts, and adds what it finds to the report.

With True, only the program's own regions are checked; they record into the report and do not raise.
"""


@contextmanager
def _syncs(report: SyncReport, regions: bool) -> Iterator[None]:
    watch.REPORT_SINKS.append(report)
    try:
        with ExitStack() as stack:
            if not regions:
                _everywhere(stack, lambda: no_sync(mode="record"))
            yield
    finally:
        watch.REPORT_SINKS.remove(report)


@contextmanager
def _races(report: SyncReport, regions: bool) -> Iterator[None]:
    """Watch all tensors, and those that the program registers by their names."""
    races: list[Race] = []
    RACE_SINKS.append(races)
    try:
        with ExitStack() as stack:
            if not regions:
                stack.enter_context(no_race("record", track="all"))
            yield
    finally:
        RACE_SINKS.remove(races)
        for race in races:
            report.add(race.finding())


def _everywhere(stack: ExitStack, region: Callable[[], Region]) -> None:
    """Enter such a region on this thread, and on each thread that is started meanwhile."""

    def around(thread: threading.Thread) -> Region:
        return region()

    stack.enter_context(region())
    threads.add(around)
    stack.callback(threads.remove, around)


DETECTORS: dict[str, Detector] = {"sync": _syncs, "race": _races}
"""The detectors by their names, as `--detect` takes them."""


class Detectors:
    """Several detectors at once, entered in order and left in reverse."""

    def __init__(self, names: list[str], *, regions: bool = False, emulate_cuda: bool = False) -> None:
        """Choose the named detectors. Raises ValueError for an unknown name.

        `regions`: only the program's own regions are checked. `emulate_cuda`: on a machine without CUDA it is emulated
        on the CPU, so that torch.cuda.is_available() is true.
        """
        for name in names:
            if name not in DETECTORS:
                raise ValueError(f"unknown detector {name!r}; there are {', '.join(DETECTORS)}")
        self._reports = {name: SyncReport() for name in names}
        self._regions = regions
        self._emulates = emulate_cuda
        self._stack = ExitStack()

    def __enter__(self) -> Detectors:
        none_there = not torch.cuda.is_available()
        if self._emulates:
            self._stack.enter_context(emulated_cuda())
        # CUDA tensors are emulated in the whole program, whichever part is checked.
        if none_there and (self._regions or (self._emulates and "sync" not in self._reports)):
            _everywhere(self._stack, emulating)
        for name, report in self._reports.items():
            self._stack.enter_context(DETECTORS[name](report, self._regions))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def findings(self) -> list[CountedFinding]:
        """What was found inside, by detector; equal findings are counted."""
        return [entry for report in self._reports.values() for entry in report.entries()]
