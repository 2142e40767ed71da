"""What is kept of a page where nothing can be deleted: its history, entries that are stored, dropped, stored again."""

from __future__ import annotations

GENERATIONS = 8
"""How often a page may be stored and dropped before it is left alone"""


def most() -> int:
    """Return the most entries of a history."""
    return 2 * GENERATIONS


def there(entries: int) -> bool:
    """Return whether the last entry is the page."""
    return entries % 2 == 1


def has_room(entries: int) -> bool:
    """Return whether the page may be stored."""
    return entries % 2 == 0 and entries < most()
