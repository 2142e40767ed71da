"""Low-rank adapters in plain torch: the terms they add to a product. The reference of the Triton kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GATHERED_TOKENS = 64
"""Tokens whose adapters are gathered at a time: this bounds the memory for copies of them."""


class AdapterPart(NamedTuple):
    """The adapter tables of one linear layer, at fixed addresses. Slot 0, for rows without an adapter, is all zeros.

    A layer of several projections of one input has that many ranks in `down`.
    """

    down: Tensor
    """[slots, projections * rank, in]"""
    up: Tensor
    """[slots, rank, out], scaled; the columns of all projections side by side"""
    ends: tuple[int, ...]
    """The end of each projection's columns"""

    @property
    def rank(self) -> int:
        return self.up.shape[1]


def adapt(x: Tensor, y: Tensor, slots: Tensor, part: AdapterPart) -> None:
    """See `Kernels.adapt`. Rows of slot 0 get zeros added."""
    for first in range(0, len(x), GATHERED_TOKENS):
        piece = slice(first, first + GATHERED_TOKENS)
        own = slots[piece]
        inner = torch.bmm(part.down.index_select(0, own), x[piece, :, None]).mT  # [t, 1, projections * rank]
        up, begin = part.up.index_select(0, own), 0
        for number, end in enumerate(part.ends):
            mine = inner[:, :, number * part.rank : (number + 1) * part.rank]
            y[piece, begin:end].add_(torch.bmm(mine, up[:, :, begin:end])[:, 0])
            begin = end
