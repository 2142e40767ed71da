"""The watchdog: work is present and no step completes. It fails the device and prints all stacks."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from gapless.base.clock import Clock, monotonic
from gapless.base.errors import StalledError


class Watchdog:
    """Looks on from a thread of its own; touches nothing while there is progress.

    `progress` counts completed steps and `busy` says whether there is work: both are read without a lock.
    `on_stall` gets the error, once; the watchdog ends after it.
    """

    def __init__(
        self, seconds: float, progress: Callable[[], int], busy: Callable[[], bool],
        on_stall: Callable[[StalledError], None], clock: Clock = monotonic,
    ) -> None:  # fmt: skip
        assert seconds > 0
        self._seconds = seconds
        self._progress = progress
        self._busy = busy
        self._on_stall = on_stall
        self._clock = clock
        self._seen = progress()
        self._since = clock()
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
        """One look: an error when there was work and no progress for too long."""
        now, progress = self._clock(), self._progress()
        if progress != self._seen or not self._busy():
            self._seen, self._since = progress, now
        elif now - self._since > self._seconds * 1e9:
            return StalledError(f"no step completed for {self._seconds:g} s while requests were waiting for one")
        return None

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._seconds / 4)):
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
