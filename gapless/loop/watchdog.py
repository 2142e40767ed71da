"""The watchdog: if work is present and no step completes, it fails the device and prints all stacks."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Protocol

from gapless.base.errors import StalledError


def patience(seconds: float, operations: float, rate: float) -> float:
    """Return the longest time of a step: `seconds`, or that of `operations` at `rate` a second if longer.

    0 stays 0, no limit.
    """
    return max(seconds, operations / rate) if seconds else 0.0


class WatchedRanks(Protocol):
    """The ranks of an engine, as a report of a stall needs them."""

    def behind(self) -> str:
        """Say which rank the others wait for."""
        ...

    def report(self) -> str:
        """Return the place of every rank, and the last orders."""
        ...


class Watchdog:
    """Watches progress from its own thread.

    `progress` changes with each completed step, and `busy` returns whether more should complete; both are read without
    a lock. `on_stall` gets the error once, and the watchdog ends.

    It counts looks at a steady pace. Clock time would also pass while the whole process is stopped (SIGSTOP, a frozen
    container, a paused machine), which is no stall.
    """

    def __init__(
        self, seconds: float, progress: Callable[[], float], busy: Callable[[], bool],
        on_stall: Callable[[StalledError], None], ranks: WatchedRanks | None = None,
    ) -> None:  # fmt: skip
        assert seconds > 0
        self._seconds = seconds
        self.pause = min(1.0, seconds / 4)
        """Seconds between looks."""
        self._progress = progress
        self._busy = busy
        self._on_stall = on_stall
        self._ranks = ranks
        self._seen = progress()
        self._looks = 0
        """Consecutive looks with work and no progress."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end unless it is the caller."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> StalledError | None:
        """Look once. Returns an error after too much time with work and no progress."""
        progress = self._progress()
        if progress != self._seen or not self._busy():
            self._seen, self._looks = progress, 0
            return None
        self._looks += 1
        if self._looks * self.pause > self._seconds:
            behind = f"; {self._ranks.behind()}" if self._ranks else ""
            return StalledError(
                f"no step completed for {self._seconds:g} s while requests were waiting for one{behind}"
            )
        return None

    def _run(self) -> None:
        while not self._stop.wait(self.pause):
            error = self.look()
            if error is not None:
                try:
                    seen = stacks() + (self._ranks.report() if self._ranks else "")
                finally:
                    self._on_stall(error)
                print(f"gapless: {error}; the stacks of all threads when it was noticed:\n{seen}", file=sys.stderr)
                return


def stacks() -> str:
    """Return the stacks of all threads, by name, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "".join(f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
