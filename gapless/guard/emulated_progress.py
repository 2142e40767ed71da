"""Answers the queries of an emulated CUDA's events and streams, whose work has run long before a program asks.

On a GPU it may not have. So what the host has not waited for is answered with False a few times: how often depends on
the line that asks and the seed alone. The first query at a line is always answered so.
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections import Counter

from . import marks
from .sites import Frame, user_stack

MOST_REFUSALS = 3
"""The largest number of queries in a row that are answered with False."""

Point = dict[int, int]
"""A point of several streams: the number of the last record on each, by its handle."""


def _join(known: Point, other: Point) -> None:
    for handle, number in other.items():
        known[handle] = max(number, known.get(handle, 0))


class StreamProgress:
    """Follows which records the host has waited for. May be called from any thread."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._last = 0
        self._reached: dict[int, Point] = {}
        """The point that the later work of each stream comes after."""
        self._passed: Point = {}
        self._all_passed = 0
        """All records up to this number have passed."""
        self._idle: dict[int, int] = {}
        """The number of device tensors when the host last waited for each stream."""
        self._refused: dict[int, int] = {}
        """How often the next queries of each stream are yet to be answered with False."""
        self._used = {0}
        """The streams that have been current since the host waited for them."""
        self._asked: Counter[Frame] = Counter()

    def record(self, handle: int) -> Point:
        """Enqueue a record on a stream; returns the point that passes with it."""
        with self._lock:
            self._last = next(self._numbers)
            reached = self._reached.setdefault(handle, {})
            reached[handle] = self._last
            return reached.copy()

    def wait(self, handle: int, point: Point) -> None:
        """Let the later work of a stream come after this point."""
        with self._lock:
            self.use(handle)
            _join(self._reached.setdefault(handle, {}), point)

    def waited(self, point: Point) -> None:
        """Note that the host has waited for this point."""
        with self._lock:
            _join(self._passed, point)

    def waited_for_all(self) -> None:
        with self._lock:
            self._all_passed = self._last
            for handle in list(self._used):
                self._rest(handle)

    def has_passed(self, point: Point) -> bool:
        return all(number <= max(self._all_passed, self._passed.get(handle, 0)) for handle, number in point.items())

    # Whole streams.

    def use(self, handle: int) -> None:
        """Note that a stream is current, so that work may be enqueued on it unseen."""
        self._used.add(handle)

    def drain(self, handle: int, is_current: bool) -> None:
        """Note that the host has waited for all work of a stream."""
        with self._lock:
            self.waited(self.record(handle))
            self._rest(handle)
            if not is_current:
                self._used.discard(handle)

    def _rest(self, handle: int) -> None:
        self._idle[handle] = marks.DEVICE_TENSORS.added
        self._refused.pop(handle, None)

    def is_busy(self, handle: int) -> bool:
        """Return whether a query of a stream is answered with False."""
        if handle not in self._used or self._idle.get(handle) == marks.DEVICE_TENSORS.added:
            return False
        with self._lock:
            if handle not in self._refused:
                self._refused[handle] = self.refusals()
            self._refused[handle] -= 1
            return self._refused[handle] >= 0

    def refusals(self) -> int:
        """Return how often the query that the user's line begins now is answered with False."""
        site = user_stack()[:1]
        nth, where = self._asked[site[0]] if site else 0, site[0] if site else Frame("", 0, "")
        self._asked[where] += 1
        drawn = zlib.crc32(f"{self._seed} {os.path.basename(where.file)} {where.line} {nth}".encode())
        return max(drawn % (MOST_REFUSALS + 1), nth == 0)
