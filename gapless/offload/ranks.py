"""The host tier of an engine of several ranks: one memory that all of them map, and transfers that all of them make.

A slot has the parts of all ranks, one after another, so tiers below see whole pages. The leader's tier decides. Each
rank moves its part between its own device and the slot; a transfer has ended when all have said so, and has failed if it
has failed on one. The checksum of a page is made of its parts' checksums. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gapless.base.records import Int64s, MoveOrder
from gapless.base.shared import SharedMemory

FAILED = b""
"""What a rank says of a transfer that has failed there"""


class MovingRanks(Protocol):
    """The other ranks, as transfers need them; see `step.orders.Ranks`."""

    def room(self, orders: int) -> int: ...

    def send(self, order: MoveOrder) -> None: ...

    def host_memory(self, nbytes: int) -> SharedMemory: ...

    def moved(self, stores: bool, number: int) -> Sequence[bytes] | None: ...


class OtherRanks:
    """What the leader's transfers have to do with the other ranks."""

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

    def joined(self, stores: bool, number: int, own: Int64s) -> list[int | None] | None:
        """Return the checksums of whole pages once all ranks have moved their parts, None each if one has failed."""
        said = self._ranks.moved(stores, number)
        if said is None:
            return None
        if FAILED in said:
            return [None] * len(own)
        return joined([own, *(np.frombuffer(one, np.int64) for one in said)]).tolist()


def joined(parts: Sequence[Int64s]) -> Int64s:
    """Return the checksums of pages from their parts', in the order of ranks: parts that change places change them."""
    whole = np.zeros_like(parts[0])
    for rank, part in enumerate(parts):
        whole += part * np.int64(2 * rank + 1)  # modulo 2 ** 64, as everywhere
    return whole
