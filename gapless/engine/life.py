"""The life of the engine's process: its control pipe, its heartbeat, and the watch over its parent.

Imports nothing heavy, so that the watch over the parent covers the seconds of torch's import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time

from gapless.loop.watchdog import Watchdog

EXIT_FAILED = 1
EXIT_STALLED = 3
EXIT_ORPHANED = 4
BEAT_SECONDS = 1.0
WATCHDOG_GRACE_SECONDS = 5.0
"""Delay of this watchdog behind the core's own."""


class Control:
    """The pipe to the parent, which works even if the loop does not."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)  # a library that prints must not speak on the control pipe
        os.set_blocking(self._fd, False)

    def say(self, line: bytes) -> None:
        """Write one line; if it does not fit it is lost, for the parent has stopped reading."""
        with contextlib.suppress(OSError):
            os.write(self._fd, line + b"\n")


class Pulse:
    """Beats each second, and ends the process if one turn of the loop never returns."""

    def __init__(self, control: Control) -> None:
        self.turn_began = 0.0
        """Start of the present turn, monotonic seconds; 0 between turns."""
        self.watchdog: Watchdog | None = None
        self._limit = 0.0
        self._control = control
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def arm(self, watchdog_seconds: float) -> None:
        """Limit one turn to this time and WATCHDOG_GRACE_SECONDS; 0: no limit."""
        if watchdog_seconds:
            self._limit = watchdog_seconds + WATCHDOG_GRACE_SECONDS
            self.watchdog = Watchdog(self._limit, lambda: self.turn_began, lambda: self.turn_began > 0, self._give_up)
            self.watchdog.start()

    def _run(self) -> None:
        while True:
            self._control.say(b"")
            time.sleep(BEAT_SECONDS)

    def _give_up(self, stall: Exception) -> None:
        faulthandler.dump_traceback(all_threads=True)
        text = f"one turn of the loop took more than {self._limit:g} s; stacks are on stderr"
        self._control.say(b'{"type":"Died","kind":"StalledError","text":"' + text.encode() + b'"}')
        os._exit(EXIT_STALLED)


def read_settings() -> bytes:
    """Return the first line of stdin. Afterwards the end of stdin, the parent's death, ends this process."""
    settings = sys.stdin.buffer.readline()
    follow_parent()
    return settings


def follow_parent() -> None:
    """End this process at the end of stdin, the parent's death."""
    threading.Thread(target=_follow_parent, name="parent-watch", daemon=True).start()


def _follow_parent() -> None:
    while os.read(0, 65536):
        pass
    os._exit(EXIT_ORPHANED)
