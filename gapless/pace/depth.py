"""Depth: the number of steps in flight, and the number that one visit enqueues."""

from __future__ import annotations

from math import ceil

from gapless.base.config import MAX_DEPTH
from gapless.pace.mean import Mean, SpreadMean

LATENCY_BUDGET_NS = 50_000_000
"""[ns] Most device time queued ahead of a waiting request, beyond the running step."""
MAX_CHAIN = 8
"""[steps] Most steps of one visit."""
STREAM_BUDGET_NS = 2_000_000
"""[ns] Most device time of a visit with several steps, whose tokens arrive together."""
MARGIN = 0.5
"""[share] Share of a step's device time that the host may spend on it; the rest is for work outside the loop, on the
CPU often on the cores that compute."""
STEP_WEIGHT = 1 / 16
"""[weight] Weight of the latest time in a mean"""
SPREADS = 4
"""[deviations] A wake-up is taken to be late by its mean and SPREADS mean deviations. A step more in flight costs
little, a late one is idle time."""


class Depth:
    """Two numbers, fixed or learnt from measurements.

    *Depth* is how many steps may be in flight when the host enqueues more. If the host slept until only depth - 1 are
    left, the device works on these while the host wakes up, reads the results, and enqueues the next: they must last as
    long as that takes.

    *Chain* is how many steps a visit enqueues while requests only decode. A visit has a fixed price (planning, packing,
    falling asleep and waking up, the engine's work between visits) and a price for each step; the chain is the shortest
    that keeps their sum under MARGIN of its device time. It is 1 if the host keeps up anyway, since a chain delays
    three things by its length: the tokens of its first steps, a new request, and the end of an aborted one.
    STREAM_BUDGET_NS bounds that, to less than a reader can notice and a tenth of a usual TTFT; requests that wait or
    have prompt left to run allow no chain at all (`Planner.chain`). At depth 1 at most `chain` steps are in flight, at
    any depth `depth + chain - 1`.
    """

    def __init__(self, fixed: int | None, chain: int | None = None) -> None:
        """`chain` None: learnt with the depth, or 1 at a fixed depth."""
        self.most = fixed or MAX_DEPTH
        self.longest = chain or (1 if fixed else MAX_CHAIN)
        self.chain = chain or 1
        """Steps of the next visit, at most."""
        self._depth = fixed or 2
        self._learns_depth = fixed is None
        self._learns_chain = fixed is None and chain is None
        self._visit, self._step, self._device = Mean(STEP_WEIGHT), Mean(STEP_WEIGHT), Mean(STEP_WEIGHT)
        """Host time of a visit, and of a step without its share of that; device time of a step; ns"""
        self._wake = SpreadMean(STEP_WEIGHT)
        """Lateness of wake-ups, ns"""

    def now(self, waiting: bool) -> int:
        """Return the number of steps in flight below which more are enqueued; `waiting`: the queue is not empty."""
        if waiting and self._learns_depth:
            return min(self._depth, 2 + int(LATENCY_BUDGET_NS / max(self._device.value, 1.0)))
        return self._depth

    def learn(self, host_ns: int, device_ns: int) -> None:
        """Take in a measured step: its host time without the visit's share, and its device time."""
        self._step.add(host_ns)
        self._device.add(device_ns)

    def host_ns(self, own: int) -> int:
        """Return a step's host time, its share of a visit included, from its `own`."""
        return own + int(self._visit.value / self.chain)

    def visited(self, host_ns: int) -> None:
        """Take in the host time of a visit, whatever number of steps it enqueued."""
        self._visit.add(host_ns)
        device_ns = max(self._device.value, 1.0)
        if self._learns_chain:
            self.chain = self._enough(device_ns)
        if self._learns_depth:
            # One step runs while the host prepares the others, which must cover its time.
            wake = self._wake.value + SPREADS * self._wake.spread
            host = wake + self._visit.value + self.chain * self._step.value
            self._depth = min(2 + int(host / device_ns), MAX_DEPTH)

    def woke(self, late_ns: int) -> None:
        """Take in how late the host resumed after a fence that it slept for."""
        self._wake.add(late_ns)

    def _enough(self, device_ns: float) -> int:
        """Return the number of steps that spreads a visit's fixed price thin enough."""
        visit_ns, spare = self._visit.value, MARGIN * device_ns - self._step.value
        wanted = ceil(visit_ns / spare) if spare * MAX_CHAIN > visit_ns else MAX_CHAIN
        return max(1, min(wanted, int(STREAM_BUDGET_NS / device_ns)))
