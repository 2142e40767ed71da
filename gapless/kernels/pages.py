"""The checksum of a page: a sum of its words, each weighted by its place, modulo 2 ** 64.

Weights are odd, below 2 ** 31, and differ. So a word that has changed by d changes the sum by d times its weight, which
is never 0; and two words of 32 bits that have changed, or have changed places, never make up for each other.
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
