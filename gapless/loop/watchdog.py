"""The watchdog: work is present and no step completes. It fails the device and prints all stacks."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from gapless.base.errors import StalledError

SLOW_CPU, SLOW_GPU = 2e10, 1e13
"""Operations a second of a slow device: two old cores, and a small GPU at a tenth of its peak."""


def patience(seconds: float, operations: float, kind: str) -> float:
    """Return how long a step may take: `seconds`, and at least what `operations` take on a slow device of this kind.

    0 stays 0, which is for ever.
    """
    rate = SLOW_GPU if kind == "cuda" else SLOW_CPU
    return max(seconds, operations / rate) if seconds else 0.0


class Watchdog:
    """Looks on from a thread of its own; touches nothing while there is progress.

    `progress` changes with each completed step, and `busy` says whether more should complete. Both are read without a
    lock. `on_stall` gets the error, once; the watchdog ends after it.

    It counts looks, which come at a steady pace while the process runs. The time on the clock would also pass while
    the whole process is stopped (SIGSTOP, a frozen container, a paused machine), and that is no stall.
    """

    def __init__(
        self, seconds: float, progress: Callable[[], float], busy: Callable[[], bool],
        on_stall: Callable[[StalledError], None],
    ) -> None:  # fmt: skip
        assert seconds > 0
        self._seconds = seconds
        self.pause = min(1.0, seconds / 4)
        """Seconds between two looks."""
        self._progress = progress
        self._busy = busy
        self._on_stall = on_stall
        self._seen = progress()
        self._looks = 0
        """Looks in a row that found work and no progress."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for that unless it is the calling one."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def look(self) -> StalledError | None:
        """Look once. Returns an error if there was work and no progress for too long."""
        progress = self._progress()
        if progress != self._seen or not self._busy():
            self._seen, self._looks = progress, 0
            return None
        self._looks += 1
        if self._looks * self.pause > self._seconds:
            return StalledError(f"no step completed for {self._seconds:g} s while requests were waiting for one")
        return None

    def _run(self) -> None:
        while not self._stop.wait(self.pause):
            error = self.look()
            if error is not None:
                seen = stacks()
                self._on_stall(error)
                print(f"gapless: {error}; the stacks of all threads when it was noticed:\n{seen}", file=sys.stderr)
                return


def stacks() -> str:
    """The stacks of all threads, by name, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "".join(f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)
