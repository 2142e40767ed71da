"""Slots: numbered places on the device that rows lease besides pages. There may be fewer than rows."""

from __future__ import annotations

from collections.abc import Collection

from gapless.memory.ledger import Clock, Ledger

NO_SLOT = 0
"""Slot number of rows without a lease. It is never leased."""


class Slots:
    """Slots on the device that rows may lease, under one name or several: `AdapterSlots` has one for each adapter."""

    def __init__(self, count: int, ledger: Ledger) -> None:
        self._ledger = ledger
        self.unused = list(range(count, NO_SLOT, -1))
        self.size = count
        """Number of slots; may be 0"""

    @property
    def free(self) -> Collection[int]:
        """Reusable slots: no step in flight touches them for their rows."""
        return self.unused

    def available(self, name: str) -> int:
        """Return how many rows may take a slot now."""
        return len(self.unused)

    def take(self, name: str) -> int:
        """Return a slot for one row."""
        return self.unused.pop()

    def retire(self, slot: int, last_step: int) -> None:
        """Release a slot after `last_step`, the last that can touch it."""
        self._ledger.retire((Clock.COMPUTE, last_step), self.unused.append, slot)
