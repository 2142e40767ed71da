"""The queue of waiting rows: bounded, by priority and arrival, with aborts in place."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from gapless.base.errors import QueueFullError
from gapless.plan.row import Row, State


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Requests in the queue and on rows, and steps in flight."""

    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    depth: int = 0
    preemptions: int = 0


class WaitingQueue:
    """A heap of waiting rows. Aborted ones stay, marked, until they reach the top."""

    def __init__(self, limit: int, by_priority: bool) -> None:
        self.limit = limit
        self._by_priority = by_priority
        self.heap: list[tuple[int, int, Row]] = []
        self.parked: dict[tuple[str, ...], list[tuple[int, int, Row]]] = {}
        """Rows without a slot, by their leases: set aside, so that others pass them at no cost."""
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def tokens(self, most: int) -> int:
        """Return the known tokens of roughly the first `most` rows, cached ones included."""
        return sum([row.length for _, _, row in self.heap[:most] if row.state is State.WAITING])

    def add(self, row: Row, free: int = 0) -> None:
        """Raises QueueFullError at the limit, beyond the rows that find one of the `free` rows."""
        if self._live >= self.limit + free:
            raise QueueFullError(f"{self._live - free} requests are waiting, which is the limit; try again later")
        self.put_back(row)

    def put_back(self, row: Row) -> None:
        """Queue a row that was admitted before, at any length of the queue."""
        heapq.heappush(self.heap, (*self.rank(row), row))
        self._live += 1

    def park(self, row: Row) -> None:
        """Set aside a popped row, since no slot for its leases is free. It still waits."""
        heapq.heappush(self.parked.setdefault(row.asked.leases, []), (*self.rank(row), row))
        self._live += 1

    def unpark(self, lends: Callable[[tuple[str, ...]], bool]) -> None:
        """Put back the first parked row of each kind whose leases are free."""
        for leases in [*self.parked]:
            parked = self.parked[leases]
            _drop_departed(parked)
            if not parked:
                del self.parked[leases]  # their lease, such as an adapter, may be gone too
            elif lends(leases):
                heapq.heappush(self.heap, heapq.heappop(parked))

    def ready(self, lends: Callable[[tuple[str, ...]], bool]) -> bool:
        """Return whether a row waits unparked, or parked with free leases."""
        for heap in (self.heap, *self.parked.values()):
            _drop_departed(heap)
        return bool(self.heap) or any(parked and lends(leases) for leases, parked in self.parked.items())

    def rank(self, row: Row) -> tuple[int, int]:
        """Return the sort key; smaller is served first."""
        return (row.asked.priority if self._by_priority else 0, row.asked.order)

    def pop(self) -> Row | None:
        while self.heap:
            row = heapq.heappop(self.heap)[2]
            if row.state is State.WAITING:
                self._live -= 1
                return row
        return None

    def remove(self, row: Row) -> None:
        """Remove a row done before its turn; it leaves the heap later, at little cost each."""
        assert row.state is not State.WAITING
        self._live -= 1
        for heap in (self.heap, *self.parked.values()):
            if len(heap) > 2 * self._live + 64:
                heap[:] = [entry for entry in heap if entry[2].state is State.WAITING]
                heapq.heapify(heap)


def _drop_departed(heap: list[tuple[int, int, Row]]) -> None:
    """Remove leading rows that no longer wait."""
    while heap and heap[0][2].state is not State.WAITING:
        heapq.heappop(heap)
