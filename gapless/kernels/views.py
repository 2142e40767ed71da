"""Views that the operations take: the tensors that belong together, as one argument each.

Views hold tensors of the device and integers of the host. T query tokens, B rows, of which C have chunks. Q query heads
and K key heads of D.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KV(NamedTuple):
    """One layer of a KV memory, and where each row's pages are in it."""

    cache: Tensor
    """[pages, layers, 2, page_size, K, D], keys before values. Page 0 is the null page."""
    layer: int
    page_table: Tensor
    """[R, W] int32, whole rows that may be apart. Entry i of a row holds positions i * page_size and on."""


class RowBatch(NamedTuple):
    """The facts about each row that attention reads. All int64.

    An inert row (finished, or padding) has a KV length of 1 or 0, and its result means nothing.
    """

    rows: Tensor
    """[B] each row's line in the page table"""
    kv_lens: Tensor
    """[B] KV entries that the row's last query token may read, its own included"""
    starts: Tensor | None = None
    """[B + 1] where each row's query tokens begin, and the end of the last row's; None when each row has one"""


class Filters(NamedTuple):
    """The filters that any row of a list has. The search for the end of another is not launched."""

    top_k: bool
    top_p: bool


class TokenBatch(NamedTuple):
    """The position of each query token and the place of its KV. All int64.

    A token of an inert row has a slot in the null page, and a position that means nothing and may be past the end.
    """

    positions: Tensor
    """[T] position in its sequence"""
    slots: Tensor
    """[T] page * page_size + offset"""


class Rotation(NamedTuple):
    """The rotation of queries and keys by their position."""

    qk_norm: Tensor | None
    """[Q + K, D] weight of the RMSNorm of each head, before the rotation; None for models without"""
    eps: float
    """epsilon of that norm"""
    table: Tensor
    """[max_len, D] float32, cosines left and sines right; positions past its end read its last row"""


class Counts(NamedTuple):
    """Sizes of a packet's sections, which fix where each begins, and of its batch."""

    rows: int
    """Rows of the packet; a batch has a decode row once for each of its places."""
    decode: int
    """The first rows decode; the others are chunks."""
    page_writes: int
    admissions: int
    tokens: int
    """T, which may be more than the rows have"""
    places: int = 1
    """Query tokens of each decode row"""

    @classmethod
    def of_decode(cls, rows: int, page_writes: int, places: int = 1) -> Counts:
        """Return the counts of a packet of decode rows alone."""
        return cls(rows, rows, page_writes, 0, rows * places, places)


class Recall(NamedTuple):
    """How far drafts from other answers may go."""

    most: int
    """Drafts of a row"""
    factor: int
    """Drafts, in thousandths of the length of the end of the history that they follow"""
    least: int
    """How often a token must have followed, in thousandths of the times that the tokens before it came"""
