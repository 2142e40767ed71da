"""Times of events on the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

REBASE_MS = 4000.0
"""Event distances are float32 milliseconds: beyond this one, half a microsecond would be lost to rounding."""


class EventClock:
    """Places timed events on the host's clock, from a `base` event that was passed at host time `base_ns`."""

    def __init__(self, base: Any, base_ns: int) -> None:
        self._base = base
        self._base_ns = base_ns

    @classmethod
    def start(cls, stream: Any, new_event: Callable[[], Any]) -> EventClock:
        """Return a clock whose base is now, on an idle stream; `new_event` makes a timed event."""
        # Twice: the first event of a stream pays for its set-up, which would show as an offset.
        for _ in range(2):
            base = new_event()
            before = time.monotonic_ns()
            base.record(stream)
            while not base.query():  # a blocking event's wait ends late
                pass
            middle = (before + time.monotonic_ns()) // 2
        return cls(base, middle)

    def at(self, event: Any, recorded: int, seen: int) -> int:
        """Return the host ns of `event`, recorded at host time `recorded` or later and known as done by `seen`."""
        ms: float = self._base.elapsed_time(event)
        # The two clocks drift apart by some microseconds a second; the host's bounds hold that, base after base.
        ns = min(seen, max(recorded, self._base_ns + round(ms * 1e6)))
        if ms > REBASE_MS:
            self._base, self._base_ns = event, ns
        return ns
