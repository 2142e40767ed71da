"""Bounds of one step that hold as long as the engine lives."""

from __future__ import annotations

from typing import NamedTuple

PLENTY = 8
"""How many times the pages that rows take in advance a pool has, at least."""


class Limits(NamedTuple):
    """Bounds of one step, which adds `least` to `most` tokens to a row. `page_writes`: `most_page_writes` at least."""

    tokens: int
    page_writes: int
    queue: int
    by_priority: bool
    least: int = 1
    most: int = 1
    row_writes: int = 1  # page table entries of a row in a captured step
    fill: int = 0
    """Words that slots and histories may be filled with: a whole history, and all that one request may ask for"""
    ahead: int = 1
    """Steps for which rows get pages at a time, where there are plenty; `row_writes` are enough for as many"""

    @property
    def growth(self) -> tuple[tuple[int, int], ...]:
        """Return for how many steps rows get pages, and how many times as many the pools have then, at least."""
        return ((self.ahead, PLENTY), (1, 1)) if self.ahead > 1 else ((1, 1),)


def most_page_writes(rows: int, max_pages: int, page_size: int, tokens: int, most: int = 1) -> int:
    """Page table entries that one group may need in a step: one longest sequence, or a whole budget of chunks that each
    begin a page, while every row grows."""
    return max_pages + -(-tokens // page_size) + rows * (2 + -(-most // page_size))
