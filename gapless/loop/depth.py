"""Depth: how many steps may be in flight."""

from __future__ import annotations

from gapless.base.config import MAX_DEPTH

LATENCY_BUDGET_NS = 50_000_000
"""Queued device time that a waiting request may find in front of it, at most, beyond the running step."""
_WEIGHT = 1 / 16


class Depth:
    """A fixed number, or as many steps as hide the host's time behind the device's."""

    def __init__(self, fixed: int | None) -> None:
        self.most = fixed or MAX_DEPTH
        self._fixed = fixed
        self._host_ns = 0.0
        self._device_ns = 0.0

    def now(self, waiting: bool) -> int:
        """Steps in flight allowed now; `waiting` is whether requests are in the queue."""
        if self._fixed:
            return self._fixed
        device_ns = max(self._device_ns, 1.0)
        # One step runs while the host prepares the others: enough of them to cover its time, rounded up.
        depth = 2 + int(self._host_ns / device_ns)
        if waiting:
            depth = min(depth, 2 + int(LATENCY_BUDGET_NS / device_ns))
        return min(depth, MAX_DEPTH)

    def learn(self, host_ns: int, device_ns: int) -> None:
        """One more measured step."""
        if self._fixed:
            return
        self._host_ns += (host_ns - self._host_ns) * _WEIGHT
        self._device_ns += (device_ns - self._device_ns) * _WEIGHT
