"""Bounds of one step, and how many prompt tokens may run beside decoding rows, which wait for them."""

from __future__ import annotations

from typing import NamedTuple

STALL = 8.0
"""A step with chunks may take this many times what a step without takes, as far as measured times tell."""
UNNOTICED_NS = 8_000_000
"""It may take this long in any case: chunks that are shorter cost more, and no reader sees the difference."""
LEAST = 32
"""Prompt tokens of a step, at least."""
_WEIGHT = 1 / 8


class Limits(NamedTuple):
    """Bounds of one step, which adds `least` to `most` tokens to a row. `page_writes`: `most_page_writes` at least."""

    tokens: int
    page_writes: int
    queue: int
    by_priority: bool
    least: int = 1
    most: int = 1
    row_writes: int = 1  # page table entries of a row in a captured step
    bounds_stalls: bool = False  # fewer prompt tokens beside decoding rows where they take long


def most_page_writes(rows: int, max_pages: int, page_size: int, tokens: int, most: int = 1) -> int:
    """Page table entries that one group may need in a step: one longest sequence, or a whole budget of chunks that each
    begin a page, while every row grows."""
    return max_pages + -(-tokens // page_size) + rows * (2 + -(-most // page_size))


class ChunkBudget:
    """The prompt tokens of a step beside decoding rows: `most`, or what measured times allow of it.

    A step with chunks is taken to last as long as one of the decoding rows alone, and a time for each prompt token.
    Both are means over the last steps, so the budget follows longer contexts, more rows, and a busier machine.
    """

    def __init__(self, most: int, learns: bool) -> None:
        """`most` are the tokens of a step, decoding rows included. Unless it `learns`, there is no other bound."""
        self._most = self._tokens = most
        self._learns = learns
        self._decode_ns = self._token_ns = 0.0

    def beside(self, rows: int) -> int:
        """The prompt tokens of a step in which this many rows decode."""
        room = self._most - rows
        return min(room, self._tokens) if rows else room

    def learn(self, decode: int, tokens: int, ns: int) -> None:
        """Take in what a step took, with this many decoding rows and prompt tokens."""
        if not self._learns:
            return
        if not tokens:
            self._decode_ns += (ns - self._decode_ns) * (_WEIGHT if self._decode_ns else 1)
        elif tokens >= LEAST:
            each = max(0.0, ns - (self._decode_ns if decode else 0.0)) / tokens
            self._token_ns += (each - self._token_ns) * (_WEIGHT if self._token_ns else 1)
        if self._decode_ns and self._token_ns:
            spare = max(STALL * self._decode_ns, UNNOTICED_NS) - self._decode_ns
            self._tokens = max(LEAST, int(spare / self._token_ns))
