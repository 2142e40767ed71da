"""The bell: it ends the host's wait for a device early, or is all that the host waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Bell:
    """Ends the host's wait for a fence early when a message has arrived or a transfer is acknowledged.

    A sender stores its message where the host will look, then rings. The bell stays rung until it is cleared, so no
    ring is lost: the host clears it first and looks for messages afterwards.

    The waits of this one sleep on Python's events. Native streams bring another, with all but `wakes` and `spares`.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """`check` raises when the device has failed; a device that fails rings."""
        self.rung = False
        self._check = check
        self._sleepers: set[threading.Event] = set()
        # Re-entrant: a signal handler or a finaliser may ring within `ring`.
        self._lock = threading.RLock()

    def ring(self) -> None:
        """End the present wait, or the next one. Callable from any thread; returns at once."""
        with self._lock:
            self.rung = True
            for sleeper in self._sleepers:
                sleeper.set()

    def clear(self) -> None:
        """Clear the bell. The host then looks for every message that was rung for."""
        self.rung = False

    def wait(self, seconds: float) -> bool:
        """Block the host until the bell is rung, `seconds` at most. Returns whether it is rung.

        Only the loop's observe calls it, and the core while the loop has nothing to do. Raises DeviceError when the
        device has failed, or fails meanwhile.
        """
        woken = threading.Event()
        self.wakes(woken)
        try:
            woken.wait(seconds)
        finally:
            self.spares(woken)
        self._check()
        return self.rung

    def wakes(self, sleeper: threading.Event) -> None:
        """Set `sleeper` at every ring until `spares`, and at once when the bell is rung already."""
        with self._lock:
            self._sleepers.add(sleeper)
            if self.rung:
                sleeper.set()

    def spares(self, sleeper: threading.Event) -> None:
        """A ring leaves `sleeper` alone again."""
        with self._lock:
            self._sleepers.discard(sleeper)
