"""The ledger: nothing is freed, only retired at a fence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Ledger:
    """Resources given up by their owner, waiting for the last step that can touch them.

    Steps complete in order on the compute stream, so the fence of a step is its number.
    """

    def __init__(self) -> None:
        self.completed = 0
        """Every step up to this one has completed and was observed by the host."""
        self._pending: dict[int, list[tuple[Callable[[Any], None], Any]]] = {}

    def retire(self, last_step: int, release: Callable[[Any], None], item: Any) -> None:
        """Call `release(item)` once step `last_step`, the last that can touch the item, has completed."""
        if last_step <= self.completed:
            release(item)
        else:
            self._pending.setdefault(last_step, []).append((release, item))

    def advance(self, step: int) -> None:
        """Step `step` has completed: what waited for it, or for an earlier one, becomes reusable."""
        assert step == self.completed + 1, f"step {step} observed after step {self.completed}"
        self.completed = step
        for release, item in self._pending.pop(step, ()):
            release(item)

    def pending(self) -> Iterator[Any]:
        """Items still fenced."""
        for entries in self._pending.values():
            for _, item in entries:
                yield item
