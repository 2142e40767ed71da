"""The host tier of an engine of several ranks: one memory that all of them map, and transfers that all of them make.

A slot has the parts of all ranks, one after another, so tiers below see whole pages. The leader's tier decides. Each
rank moves its part between its own device and the slot; a transfer has ended when all have answered, and has failed if
it has failed on one. The checksum of a page is made of its parts' checksums. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gapless.base.records import Int64s, MoveOrder
from gapless.base.shared import SharedMemory

FAILED_MOVE = b""
"""A rank's checksums of a transfer that has failed there"""


class MovingRanks(Protocol):
    """The other ranks, as transfers need them; see `step.orders.Ranks`."""

    def room(self, orders: int) -> int: ...

    def send(self, order: MoveOrder) -> None: ...

    def host_memory(self, nbytes: int) -> SharedMemory: ...

    def moved(self, stores: bool, number: int) -> Sequence[bytes] | None: ...


class OtherRanks:
    """The other ranks, as the leader's transfers order them about."""

    def __init__(self, ranks: MovingRanks) -> None:
        self._ranks = ranks
        self.steps = 0
        """Steps of the engine that the leader has observed"""

    @property
    def ready(self) -> bool:
        """Return whether a transfer can be ordered now."""
        return self._ranks.room(1) > 0

    def host_memory(self, nbytes: int) -> SharedMemory:
        """Return the memory for the slots, which all ranks map."""
        return self._ranks.host_memory(nbytes)

    def tell(self, stores: bool, number: int, counts: Sequence[tuple[int, int]], places: bytes) -> None:
        """Order the others to move their parts, too."""
        self._ranks.send(MoveOrder(stores, number, self.steps, tuple(counts), places))

    def moved(self, stores: bool, number: int) -> Sequence[bytes] | None:
        """Return the checksums of their parts once all have moved them; see `step.orders.Ranks`."""
        return self._ranks.moved(stores, number)


def joined(own: Int64s, others: Sequence[bytes]) -> Int64s | None:
    """Return the checksums of pages from their parts', in the order of ranks; None if a rank has failed. Parts that
    change places change them."""
    if FAILED_MOVE in others:
        return None
    whole = own.copy()
    for rank, part in enumerate(others, 1):
        whole += np.frombuffer(part, np.int64) * np.int64(2 * rank + 1)  # modulo 2 ** 64, as everywhere
    return whole
