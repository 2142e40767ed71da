"""Views, the arguments of operations: tensors that belong together.

Views hold tensors of the device and integers of the host. T query tokens, B rows, C of them with chunks. Q query heads
and K key heads of D.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.kinds import Reach


class KV(NamedTuple):
    """One layer of a KV memory, and the page table."""

    cache: Tensor
    """[pages, layers, 2, page_size, K, D], keys before values, of the model's dtype or float8_e4m3fn; or uint8 [pages,
    layers, 1, page_size, K, D * 3 / 2 + 4]: see `kernels.kv`. Page 0 is the null page."""
    layer: int
    page_table: Tensor
    """[R, W] int32, whole rows that may be apart. Entry i of a row holds the positions from i * page_size."""
    scales: Tensor | None = None
    """float32 [layers, 2] of keys and values: a number is its stored one times the scale. None for the model's dtype"""

    @property
    def head_dim(self) -> int:
        """D"""
        width = self.cache.shape[5]
        return width if self.cache.dtype != torch.uint8 else (width - 4) // 3 * 2


class Attend(NamedTuple):
    """The arguments of a layer's attention."""

    scale: float
    """Factor of queries times keys"""
    reach: Reach = Reach.CAUSAL
    size: int = 0
    """Entries of a window or chunk"""
    softcap: float = 0.0
    """Scores become softcap * tanh(score * scale / softcap); 0: they do not"""
    sinks: Tensor | None = None
    """float32 [Q] a further logit of each head, without a value: not scaled, and not capped"""


class RowBatch(NamedTuple):
    """Attention's inputs for each row. All int64.

    An inert row (finished, or padding) has a KV length of 1 or 0 and an undefined result.
    """

    rows: Tensor
    """[B] each row's line in the page table"""
    kv_lens: Tensor
    """[B] KV entries readable by the row's last query token, its own included"""
    starts: Tensor | None = None
    """[B + 1] start of each row's query tokens, and the end of the last row's; None if each row has one"""
    spans: Tensor | None = None
    """int32 [T, 2] first and end position of the bidirectional span of each query token of chunks, (p, p + 1) outside:
    a query reads the span too, as far as it is written"""


class Filters(NamedTuple):
    """Filters used by any row of a list. Searches for unused ones are not launched."""

    top_k: bool
    top_p: bool


class NormWeights(NamedTuple):
    """The weights of a norm. All float32 [hidden]."""

    weight: Tensor
    bias: Tensor | None = None


class Rotation(NamedTuple):
    """The rotation of queries and keys by their position."""

    qk_norm: Tensor | None
    """[Q + K, D] float32 weight of the RMSNorm of each head, before the rotation; None for models without"""
    eps: float
    """epsilon of that norm"""
    angles: Tensor
    """[T, D] float32, of each token: cosines left and sines right, for the pairs of numbers D / 2 apart. Rows may be
    apart, or all the same one."""


class LayerRows(NamedTuple):
    """The rows of a forward, and the KV memory that they read and write."""

    slots: Tensor
    """int64 [T] page * page_size + offset of each token's KV; of an inert row in the null page"""
    batch: RowBatch
    cache: Tensor
    """See `KV`"""
    page_table: Tensor
    adapters: Tensor | None = None
    """int64 [T] slot of each token's adapter, 0 for none; None if no row has one"""
    apart: bool = True
    """Whether no row reads what another one of the batch writes"""
    scales: Tensor | None = None
    """See `KV`"""

    def kv(self, layer: int) -> KV:
        return KV(self.cache, layer, self.page_table, self.scales)


class Counts(NamedTuple):
    """Sizes of a packet's sections, which fix their offsets, and of its batch."""

    rows: int
    """Rows of the packet; a batch repeats a decode row for each of its places."""
    decode: int
    """The first rows decode; the others are chunks."""
    page_writes: int
    admissions: int
    tokens: int
    """T, which may exceed the rows' tokens"""
    places: int = 1
    """Query tokens of each decode row"""

    @classmethod
    def of_decode(cls, rows: int, page_writes: int, places: int = 1) -> Counts:
        """Return the counts of a packet of decode rows alone."""
        return cls(rows, rows, page_writes, 0, rows * places, places)


class Recall(NamedTuple):
    """Bounds of drafts from other answers."""

    most: int
    """Drafts of a row"""
    factor: int
    """Most drafts, in thousandths of the length of the matched end of the history"""
    least: int
    """Least share of occurrences followed by the token, in thousandths"""
