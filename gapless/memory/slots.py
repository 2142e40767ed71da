"""Slots: numbered places on the device that rows lease beside their pages. There may be fewer than rows."""

from __future__ import annotations

from collections.abc import Collection

from gapless.memory.ledger import Clock, Ledger

NO_SLOT = 0
"""The slot that the parameters of a row name when it leases none. It is never leased."""


class Slots:
    """Slots on the device that rows may lease, under one name or several: `AdapterSlots` has one for each adapter."""

    def __init__(self, count: int, ledger: Ledger) -> None:
        self._ledger = ledger
        self.unused = list(range(count, NO_SLOT, -1))
        self.size = count
        """Slots in all; 0 where there are none"""

    @property
    def free(self) -> Collection[int]:
        """Slots that may be given away: no step that can still run touches them for its rows."""
        return self.unused

    def available(self, name: str) -> int:
        """Return how many rows may take a slot now."""
        return len(self.unused)

    def take(self, name: str) -> int:
        """Return a slot for one row."""
        return self.unused.pop()

    def retire(self, slot: int, last_step: int) -> None:
        """The row leaves; `last_step` is the last step that can touch the slot, which comes back then."""
        self._ledger.retire((Clock.COMPUTE, last_step), self.unused.append, slot)
