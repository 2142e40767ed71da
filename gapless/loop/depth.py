"""Depth: how many steps may be in flight, and how many one visit enqueues."""

from __future__ import annotations

from math import ceil

from gapless.base.config import MAX_DEPTH

LATENCY_BUDGET_NS = 50_000_000
"""Queued device time that a waiting request may find in front of it, at most, beyond the running step."""
MAX_CHAIN = 8
"""Steps of one visit, at most."""
STREAM_BUDGET_NS = 2_000_000
"""Device time of one visit's steps, at most, when it has several: their tokens come out together."""
MARGIN = 0.5
"""How much of a step's time the host may take for one: the rest is for what it does beside the loop, on the CPU often
on the cores that compute."""
_WEIGHT = 1 / 16
SPREADS = 4
"""A wake-up is as late as its mean and SPREADS mean deviations: what TCP waits for an answer (Jacobson, "Congestion
Avoidance and Control", SIGCOMM 88). A step more in flight costs little, one that comes too late is idle time."""


class Depth:
    """Two numbers, fixed or learnt from what was measured.

    *Depth* is how many steps may be in flight when the host comes to enqueue more. When it has slept until only depth -
    1 are left, the device works on these while the host wakes up, takes in what has ended, and enqueues the next: so
    they must last as long as that takes.

    *Chain* is how many steps a visit enqueues while requests only decode. A visit has a price of its own (planning,
    packing, falling asleep and waking up, what the engine does between visits) and a price for each step; the chain is
    the shortest for which both together stay under MARGIN of the time that the device takes for as many steps. It is 1
    where the host keeps up anyway, since a chain delays three things by its length: the tokens of its first steps, a
    newcomer, and the end of what was aborted. STREAM_BUDGET_NS bounds that, to less than a reader can notice and a
    tenth of a usual TTFT; requests that wait or have prompt left to run allow no chain at all (`Planner.chain`). A
    chain at depth 1 is at most `chain` steps in flight, at any depth `depth + chain - 1`.
    """

    def __init__(self, fixed: int | None, chain: int | None = None) -> None:
        """`chain` None: learnt with the depth, or 1 at a fixed one."""
        self.most = fixed or MAX_DEPTH
        self.longest = chain or (1 if fixed else MAX_CHAIN)
        self.chain = chain or 1
        """Steps that the next visit may enqueue."""
        self._depth = fixed or 2
        self._learns_depth = fixed is None
        self._learns_chain = fixed is None and chain is None
        self._visit_ns = self._step_ns = self._device_ns = self._wake_ns = self._wake_spread = 0.0

    def now(self, waiting: bool) -> int:
        """Steps in flight below which more may be enqueued; `waiting` is whether requests are in the queue."""
        if waiting and self._learns_depth:
            return min(self._depth, 2 + int(LATENCY_BUDGET_NS / max(self._device_ns, 1.0)))
        return self._depth

    def learn(self, host_ns: int, device_ns: int) -> None:
        """Take in a measured step: what it cost the host by itself, and the device."""
        self._step_ns += (host_ns - self._step_ns) * _WEIGHT
        self._device_ns += (device_ns - self._device_ns) * _WEIGHT

    def host_ns(self, own: int) -> int:
        """Return what a step costs the host that costs it `own` by itself, its share of a visit included."""
        return own + int(self._visit_ns / self.chain)

    def visited(self, host_ns: int) -> None:
        """Take in a visit: what it cost the host, however many steps it enqueued."""
        self._visit_ns += (host_ns - self._visit_ns) * _WEIGHT
        device_ns = max(self._device_ns, 1.0)
        if self._learns_chain:
            self.chain = self._enough(device_ns)
        if self._learns_depth:
            # One step runs while the host prepares the others: enough of them to cover its time, rounded up.
            wake = self._wake_ns + SPREADS * self._wake_spread
            host = wake + self._visit_ns + self.chain * self._step_ns
            self._depth = min(2 + int(host / device_ns), MAX_DEPTH)

    def woke(self, late_ns: int) -> None:
        """The host slept until a fence passed, and went on so much later."""
        self._wake_spread += (abs(late_ns - self._wake_ns) - self._wake_spread) * _WEIGHT
        self._wake_ns += (late_ns - self._wake_ns) * _WEIGHT

    def _enough(self, device_ns: float) -> int:
        """Steps over which a visit's own price is spread thin enough."""
        spare = MARGIN * device_ns - self._step_ns
        wanted = ceil(self._visit_ns / spare) if spare * MAX_CHAIN > self._visit_ns else MAX_CHAIN
        return max(1, min(wanted, int(STREAM_BUDGET_NS / device_ns)))
