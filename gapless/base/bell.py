"""The bell: it ends the host's wait for a device early."""

from __future__ import annotations

import threading
from typing import Protocol


class Bell(Protocol):
    """What ends the host's wait for a fence early: a message has come, or a transfer is acknowledged.

    A sender of news leaves it where the host will look, and rings. The bell stays rung until it is cleared, so no ring
    is lost: the host clears it first, and looks for news afterwards.
    """

    @property
    def rung(self) -> bool: ...

    def ring(self) -> None:
        """End the present wait, or the next one. Callable from any thread; returns at once."""
        ...

    def clear(self) -> None:
        """The host will look for all the news that was rung for."""
        ...


class HostBell:
    """The bell of a device whose waits sleep on Python's events."""

    def __init__(self) -> None:
        self.rung = False
        self._sleepers: set[threading.Event] = set()
        # Re-entrant: a signal handler or a finaliser may ring within `ring`.
        self._lock = threading.RLock()

    def ring(self) -> None:
        with self._lock:
            self.rung = True
            for sleeper in self._sleepers:
                sleeper.set()

    def clear(self) -> None:
        self.rung = False

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
