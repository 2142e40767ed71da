"""The ledger: nothing is freed, only retired at a fence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any


class Clock(IntEnum):
    """Numbered events that complete in order, and that the host observes."""

    COMPUTE = 0
    """Steps."""
    BULK_OUT = 1
    """Transfers of pages from the device."""
    BULK_IN = 2
    """Transfers of pages to the device."""
    ADAPTERS = 3
    """Loads of adapters to the device."""


At = tuple[Clock, int]
"""A clock, and the number it must pass"""


class Ledger:
    """Released resources, waiting for the last step or transfer that can touch them."""

    def __init__(self) -> None:
        self.passed = [0] * len(Clock)
        """The last number of each clock that completed and was observed by the host."""
        self._pending: list[dict[int, list[tuple[Callable[[Any], None], Any]]]] = [{} for _ in Clock]

    @property
    def completed(self) -> int:
        """The last observed step."""
        return self.passed[Clock.COMPUTE]

    def retire(self, at: At, release: Callable[[Any], None], item: Any) -> None:
        """Call `release(item)` once the clock of `at` has passed its number."""
        clock, number = at
        if number > self.passed[clock]:
            self._pending[clock].setdefault(number, []).append((release, item))
        else:
            release(item)

    def advance(self, clock: Clock, number: int) -> None:
        """Release the resources that waited for `number`, which has passed.

        Called by the loop's thread. Another thread that sees the end of a transfer leaves a note, and rings the bell.
        """
        assert number == self.passed[clock] + 1, f"{clock.name} {number} observed after {self.passed[clock]}"
        self.passed[clock] = number
        for release, item in self._pending[clock].pop(number, ()):
            release(item)

    def pending(self) -> Iterator[Any]:
        """Yield the items still fenced."""
        for waiting in self._pending:
            for entries in waiting.values():
                for _, item in entries:
                    yield item
