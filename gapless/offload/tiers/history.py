"""A page in a store that cannot delete: its history of entries, stored, dropped, stored again.

Questions about histories take a millisecond a page and more, so pages that were seen count as found until a load fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gapless.offload.tiers.seam import Found

MOST_KEYS = 65_536
GENERATIONS = 8
"""How often a page may be stored and dropped before it is left alone"""


def most() -> int:
    return 2 * GENERATIONS


def there(entries: int) -> bool:
    """Return whether the last entry is the page."""
    return entries % 2 == 1


def has_room(entries: int) -> bool:
    """Return whether the page may be stored."""
    return entries % 2 == 0 and entries < most()


class Seen:
    """Keys of pages that the last question found."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def unknown(self, keys: Sequence[bytes], most: int) -> list[bytes]:
        """Return the first of these keys that have to be asked for."""
        return [key for key in keys if key not in self._keys][:most]

    def found(self, keys: Sequence[bytes], asked: Sequence[bytes]) -> list[Found]:
        """Return the stored ones of these keys; some were asked for already."""
        missing = {*asked} - self._keys
        return [
            Found.HIT if key in self._keys else Found.MISS if key in missing else Found.PENDING for key in keys
        ]  # fmt: skip

    def add(self, keys: Iterable[bytes]) -> None:
        if len(self._keys) > MOST_KEYS:
            self._keys.clear()
        self._keys.update(keys)

    def forget(self, keys: Iterable[bytes]) -> None:
        self._keys.difference_update(keys)
