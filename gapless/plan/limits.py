"""Bounds of one step, fixed for the engine's life."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

PLENTY = 8
"""Least size of a pool, in times of the pages that rows take in advance."""


class Limits(NamedTuple):
    """Bounds of one step, which adds `least` to `most` tokens to a row. `page_writes` is `most_page_writes` or more."""

    tokens: int
    page_writes: int
    queue: int
    by_priority: bool
    least: int = 1
    most: int = 1
    row_writes: int = 1  # page table entries of a row in a captured step
    fill: int = 0
    """Most words that fill slots and histories: a whole history and all slots of one request"""
    ahead: int = 1
    """Steps' worth of pages that a row takes at once if there are plenty, within `row_writes`"""

    chunk_limit: Callable[[int, int], int] | None = None
    """Limit of prompt tokens in a step with decoding rows, which get none before it ends: from the number of these rows
    and of the prompt tokens that could run."""

    @property
    def growth(self) -> tuple[tuple[int, int], ...]:
        """Return pairs (steps, times), most steps first: pages for `steps` are taken if the pools hold `times` as many
        pages."""
        return ((self.ahead, PLENTY), (1, 1)) if self.ahead > 1 else ((1, 1),)


def most_page_writes(rows: int, max_pages: int, page_size: int, tokens: int, most: int = 1) -> int:
    """Return the most page table entries of one group in a step: one longest sequence, or a budget of chunks that each
    begin a page, while every row grows."""
    return max_pages + -(-tokens // page_size) + rows * (2 + -(-most // page_size))
