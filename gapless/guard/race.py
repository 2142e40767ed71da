"""`no_race()`: inside it, two accesses to the same memory that nothing orders are an error."""

from __future__ import annotations

import functools
from contextlib import ContextDecorator
from itertools import product
from typing import Literal

from . import forks, hooks, marks, race_reads
from .backends import backend
from .emulated_triton import FOLLOWERS
from .patches import Patches
from .present import accelerator
from .race_checker import RaceChecker
from .race_cuda import CudaWatch, EmulatedWatch
from .race_device import DeviceWatch, Scheduled
from .race_groups import GroupWatch
from .race_kernels import follow
from .race_mode import mode
from .race_report import Race, RaceError
from .race_streams import StreamWatch
from .race_threads import ThreadWatch
from .report import SyncReport

__all__ = ["Race", "RaceChecker", "RaceError", "no_race"]

RACE_SINKS: list[SyncReport] = []
"""The runners' reports, which get the races of every region. While there is one, no region raises."""


class no_race(ContextDecorator):
    """A happens-before checker over streams, fences and host threads. It belongs to the whole process.

    `with no_race() as checker:` gives a `RaceChecker`, with which buffers are registered; `track="all"` watches every
    tensor, which costs more. `mode` "raise" raises RaceError: at once for what a host thread does; at the host's next
    launch, fence, query or the end for what a program on a stream does. "record" only collects `checker.races`.
    `threads="one"` takes all host threads as ordered, for programs that order them by means that are not seen.
    Threads must be started inside to be watched. A region inside another belongs to that one's checker.

    Example:
        with no_race() as checker:
            checker.register("staging", staging)
            step()
    """

    def __init__(
        self,
        mode: Literal["raise", "record"] = "raise",
        *,
        track: Literal["registered", "all"] = "registered",
        threads: Literal["each", "one"] = "each",
    ) -> None:
        if mode not in ("raise", "record") or track not in ("registered", "all") or threads not in ("each", "one"):
            raise ValueError(f"no_race(mode={mode!r}, track={track!r}, threads={threads!r}): no such choice")
        self._options = (mode == "raise" and not RACE_SINKS, track == "all", threads == "one")

    def __enter__(self) -> RaceChecker:
        with _turn:
            outer = _active[-1] if _active else None
            self._checker = outer or RaceChecker(*self._options, floor=Scheduled.__call__.__code__)
            self._names = set(self._checker.buffers.by_name)
            _active.append(self._checker)
        self._stack = Patches()
        if outer is None:
            _install(self._checker, self._stack)
        return self._checker

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        checker = self._checker
        self._stack.close()
        with _turn:
            _active.pop()
        if _active:
            checker.buffers.keep_only(self._names)
            return
        for report, race in product(RACE_SINKS, checker.races):
            report.add(race.finding())
        if self._options[0] and error is None:
            checker.check()


_turn = forks.lock()
_active: list[RaceChecker] = []


def forked() -> None:
    """Begin again in a forked child: no race so far, and all that its parent did is over."""
    for checker in _active[:1]:
        checker.agents.forked()
        checker.races.clear()


def found() -> list[Race]:
    """Return the races so far of a region that is on, for the runners."""
    return _active[0].races if _active else []


def begin_again() -> None:
    """Have what follows race with nothing that was done before; the races so far stay."""
    for checker in _active[:1]:
        checker.begin_again()


def _install(checker: RaceChecker, stack: Patches) -> None:
    """Connect the checker with everything that reports to it, until the stack is closed."""
    device = checker.device = _device_watch(checker)
    if device is not None:
        device.install(stack)
        GroupWatch(checker, device).install(stack)
        kernels = functools.partial(follow, checker)
        FOLLOWERS.append(kernels)
        stack.callback(FOLLOWERS.remove, kernels)
        checker.follows_results = True
    race_reads.install(checker, stack)
    ThreadWatch(checker).install(stack)
    stack.enter_context(hooks.observed_by(DeviceWatch(checker)))
    stack.put(checker, "active", True)
    stack.enter_context(mode(checker))


def _device_watch(checker: RaceChecker) -> StreamWatch | None:
    kind = accelerator()
    if not kind:
        return None
    if marks.emulated.type == "cuda":
        return EmulatedWatch(checker)
    return CudaWatch(checker) if kind == "cuda" else StreamWatch(checker, backend(kind))
