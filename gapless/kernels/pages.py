"""The checksum of a page: a sum of its words, each weighted by its place, modulo 2 ** 64.

Weights are odd, below 2 ** 31, and differ. So one word that has changed, or two of 32 bits that have changed places,
always change the sum; other changes do, except by chance. It finds faults, not forgeries.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 0x1E3779B1
"""Odd: multiples of it modulo 2 ** 30 are a permutation."""
MASK = (1 << 30) - 1


def weights(words: int, device: torch.device) -> Tensor:
    """Return int64 [words]: what each word counts."""
    return (torch.arange(words, device=device) * FACTOR & MASK) * 2 + 1


def page_sum(page: Tensor, total: Tensor) -> None:
    """See `seam.Kernels.page_sum`."""
    total += (page.to(torch.int64) * weights(len(page), page.device)).sum()
