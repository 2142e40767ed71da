"""The queue of waiting sequences: bounded, ordered by priority and arrival, with aborts in place."""

from __future__ import annotations

import heapq

from gapless.base.errors import QueueFullError
from gapless.plan.sequence import Sequence, State


class WaitingQueue:
    """A heap of waiting sequences. Aborted ones stay in it, marked, until they come to the top."""

    def __init__(self, limit: int, by_priority: bool) -> None:
        self._limit = limit
        self._by_priority = by_priority
        self.heap: list[tuple[int, int, Sequence]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def add(self, seq: Sequence, free: int = 0) -> None:
        """Raises QueueFullError at the limit, which counts those that find none of the `free` rows."""
        if self._live >= self._limit + free:
            raise QueueFullError(f"{self._live - free} requests are waiting, which is the limit; try again later")
        self.put_back(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queue a sequence that was admitted before. The limit does not apply to it."""
        heapq.heappush(self.heap, (*self.rank(seq), seq))
        self._live += 1

    def rank(self, seq: Sequence) -> tuple[int, int]:
        """Smaller goes first."""
        return (seq.priority if self._by_priority else 0, seq.order)

    def pop(self) -> Sequence | None:
        while self.heap:
            seq = heapq.heappop(self.heap)[2]
            if seq.state is State.WAITING:
                self._live -= 1
                return seq
        return None

    def remove(self, seq: Sequence) -> None:
        """The sequence is done before its turn; it leaves the heap later, at little cost each."""
        assert seq.state is not State.WAITING
        self._live -= 1
        if len(self.heap) > 2 * self._live + 64:
            self.heap = [entry for entry in self.heap if entry[2].state is State.WAITING]
            heapq.heapify(self.heap)
