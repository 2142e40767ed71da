"""Slots: numbered places on the device that rows lease beside their pages. There may be fewer than rows."""

from __future__ import annotations

from gapless.memory.ledger import Clock, Ledger

NO_SLOT = 0
"""The slot that the parameters of a row name when it leases none. It is never leased."""


class Slots:
    """The slots of one device table. A slot that is given up comes back when its last step has completed."""

    def __init__(self, count: int, ledger: Ledger) -> None:
        self._ledger = ledger
        self.free = list(range(count, NO_SLOT, -1))
        self.size = count

    def available(self) -> int:
        return len(self.free)

    def take(self) -> int:
        """A slot for one row."""
        return self.free.pop()

    def retire(self, slot: int, last_step: int) -> None:
        """The row leaves; `last_step` is the last step that can touch the slot."""
        self._ledger.retire(((Clock.COMPUTE, last_step),), self.free.append, slot)
