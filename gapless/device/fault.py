"""Keeps the first error of a device, and ends the waits of the host on it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gapless.base.bell import Bell
from gapless.base.errors import DeviceError


class Fault:
    """The first error of a device, or none. Set once, from any thread; `error` may be read without a lock."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._where = ""
        self._bell = Bell()
        self._wakes: list[Callable[[], None]] = []
        self._ask: Callable[[], str] = str
        # Re-entrant: a garbage collection inside the locked region may close a device.
        self._lock = threading.RLock()

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake` too, once, at the error: it ends waits that do not block here."""
        self._wakes.append(wake)

    def asks(self, reason: Callable[[], str]) -> None:
        """Have fences call `reason` before they pass: it returns why results are undefined, or an empty text."""
        self._ask = reason

    def ask(self) -> None:
        """Fail and raise DeviceError if the programs' results are undefined."""
        if reason := self._ask():
            self.set(RuntimeError(reason), "a rank has failed")
            self.check()

    def set(self, error: BaseException, where: str) -> None:
        """Keep the first error and wake every wait."""
        with self._lock:
            if self.error is not None:
                return
            self._where = where
            self.error = error
            wakes, self._wakes = self._wakes, []
        # Outside: a thread that begins to wait may close a device while it holds the bell's lock.
        self._bell.ring()
        for wake in wakes:
            wake()

    def check(self) -> None:
        """Raise DeviceError when set."""
        if self.error is not None:
            raise DeviceError(f"{self._where}: {type(self.error).__name__}: {self.error}") from self.error

    def block(self, wait: threading.Event, bell: Bell | None = None) -> None:
        """Block until `wait` is set, by its owner, by this fault or by a ring of `bell`."""
        bells = [one for one in (self._bell, bell) if one is not None]
        try:
            for one in bells:
                one.wakes(wait)
            wait.wait()
        finally:
            for one in bells:
                one.spares(wait)
