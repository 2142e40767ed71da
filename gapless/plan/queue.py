"""The queue of waiting sequences: bounded, by priority and arrival, with aborts in place."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from gapless.base.errors import QueueFullError
from gapless.plan.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Requests in the queue and on rows, and steps in flight."""

    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    depth: int = 0
    preemptions: int = 0


class WaitingQueue:
    """A heap of waiting sequences. Aborted ones stay, marked, until they reach the top."""

    def __init__(self, limit: int, by_priority: bool) -> None:
        self.limit = limit
        self._by_priority = by_priority
        self.heap: list[tuple[int, int, Sequence]] = []
        self.parked: dict[tuple[str, ...], list[tuple[int, int, Sequence]]] = {}
        """Sequences without a slot, by their leases: set aside, so that others pass them at no cost."""
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def tokens(self, most: int) -> int:
        """Return the known tokens of roughly the first `most` sequences, cached ones included."""
        return sum([seq.length for _, _, seq in self.heap[:most] if seq.state is State.WAITING])

    def add(self, seq: Sequence, free: int = 0) -> None:
        """Raises QueueFullError at the limit, beyond the sequences that find one of the `free` rows."""
        if self._live >= self.limit + free:
            raise QueueFullError(f"{self._live - free} requests are waiting, which is the limit; try again later")
        self.put_back(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queue a sequence that was admitted before, at any length of the queue."""
        heapq.heappush(self.heap, (*self.rank(seq), seq))
        self._live += 1

    def park(self, seq: Sequence) -> None:
        """Set aside a popped sequence, since no slot for its leases is free. It still waits."""
        heapq.heappush(self.parked.setdefault(seq.leases, []), (*self.rank(seq), seq))
        self._live += 1

    def unpark(self, lends: Callable[[tuple[str, ...]], bool]) -> None:
        """Put back the first parked sequence of each kind whose leases are free."""
        for leases in [*self.parked]:
            parked = self.parked[leases]
            _drop_departed(parked)
            if not parked:
                del self.parked[leases]  # their lease, such as an adapter, may be gone too
            elif lends(leases):
                heapq.heappush(self.heap, heapq.heappop(parked))

    def ready(self, lends: Callable[[tuple[str, ...]], bool]) -> bool:
        """Return whether a sequence waits unparked, or parked with free leases."""
        for heap in (self.heap, *self.parked.values()):
            _drop_departed(heap)
        return bool(self.heap) or any(parked and lends(leases) for leases, parked in self.parked.items())

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """Return the sort key; smaller is served first."""
        return (seq.priority if self._by_priority else 0, seq.order)

    def pop(self) -> Sequence | None:
        while self.heap:
            seq = heapq.heappop(self.heap)[2]
            if seq.state is State.WAITING:
                self._live -= 1
                return seq
        return None

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence done before its turn; it leaves the heap later, at little cost each."""
        assert seq.state is not State.WAITING
        self._live -= 1
        for heap in (self.heap, *self.parked.values()):
            if len(heap) > 2 * self._live + 64:
                heap[:] = [entry for entry in heap if entry[2].state is State.WAITING]
                heapq.heapify(heap)


def _drop_departed(heap: list[tuple[int, int, Sequence]]) -> None:
    """Remove leading sequences that no longer wait."""
    while heap and heap[0][2].state is not State.WAITING:
        heapq.heappop(heap)
