"""Counts of watched things, so that a clean run is not mistaken for one without anything to see."""

from __future__ import annotations

import _posixsubprocess
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from subprocess import Popen
from typing import Any

from . import forks, marks
from .backends import backend
from .patches import Patches
from .present import accelerator, allocator_stats


class Tally:
    """Counts by name, which only grow. May be added to from any thread."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def counts(self) -> Counter[str]:
        with self._lock:
            return self._counts.copy()


TALLY = Tally()
"""The process's own: copies, streams, threads and processes."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Numbers of watched things of each kind in one run."""

    device_tensors: int
    """Storages on a device that the program made, real or emulated."""
    copies: int
    """Copies between host and device, in both directions."""
    streams: int
    """Streams that the race detector followed."""
    threads: int
    """Threads of Python that were checked."""
    processes: int
    """Processes that the program started."""
    children: int = 0
    """Watched child processes; the counts above include theirs."""
    lost: int = 0
    """Child processes that were watched and left no report, so that their findings are not known."""

    def text(self) -> str:
        """Return one line for people."""
        kinds = [
            _number(self.device_tensors, "device tensor"), _number(self.copies, "copy", "copies"),
            _number(self.streams, "stream"), _number(self.threads, "thread"),
        ]  # fmt: skip
        text = f"watched {', '.join(kinds)}"
        processes = _number(self.processes, "process", "processes")
        if self.children or self.lost:
            text += f"; of {processes} started by it {self.children} watched, {self.lost} lost"
        elif self.processes:
            text += f"; {processes} started by it, not watched"
        return text

    def with_children(self, children: list[dict[str, int]], lost: int) -> Watched:
        """Return the sum with what child processes watched; of `lost` others that is not known."""
        names = ("device_tensors", "copies", "streams", "threads")
        sums = {name: sum((child[name] for child in children), getattr(self, name)) for name in names}
        return replace(self, **sums, children=len(children), lost=lost)

    def says_nothing(self, detectors: Collection[str]) -> bool:
        """Return whether these detectors can have found nothing, whatever the program does.

        Threads alone are something to the race detector; beside the detector of syncs they do not count, since
        libraries start threads in programs in which no tensor was ever on a device.
        """
        if self.device_tensors or self.streams:
            return False
        return "sync" in detectors or self.threads == 1


class Watching:
    """Counts from its making on."""

    def __init__(self, patches: Patches) -> None:
        # All ways of Python's own: subprocess, forked workers, spawned workers.
        for owner, name in ((Popen, "__init__"), (os, "fork"), (_posixsubprocess, "fork_exec")):
            patches.wrap(owner, name, _counted)
        self.renew()

    def renew(self) -> None:
        """Count from now on."""
        self._before = TALLY.counts()
        self._tensors = _device_tensors()

    def so_far(self) -> Watched:
        """Return the counts until now."""
        counts = TALLY.counts() - self._before
        tensors = _device_tensors() - self._tensors
        return Watched(tensors, counts["copies"], counts["streams"], counts["threads"] + 1, counts["processes"])


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _counted(original: Any, *args: Any, **kwargs: Any) -> Any:
    TALLY.add("processes")
    return original(*args, **kwargs)


def _device_tensors() -> int:
    """Count the storages of device tensors so far: marked ones, and allocations of the accelerator's allocator."""
    row = backend(accelerator() or "cuda")
    return marks.DEVICE_TENSORS.added + int(allocator_stats(row, "memory_stats").get("allocation.all.allocated", 0))
