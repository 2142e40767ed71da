"""Copies of pages and their checksums: sums of a page's words, each weighted by its place, modulo 2 ** 64.

Weights are odd, below 2 ** 31, and differ. So one changed word, or two swapped ones of 32 bits, always change the sum;
other changes do, except by chance. It finds faults, not forgeries.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 0x1E3779B1
"""Odd: multiples of it modulo 2 ** 30 are a permutation."""
MASK = (1 << 30) - 1


def weights(words: int, device: torch.device) -> Tensor:
    """Return int64 [words]: the weight of each word."""
    return (torch.arange(words, device=device) * FACTOR & MASK) * 2 + 1


def copy_pages(src: Tensor, dst: Tensor, places: Tensor, sums: Tensor) -> None:
    """See `seam.Kernels.copy_pages`."""
    for number, (source, target) in enumerate(zip(*places.tolist(), strict=True)):  # san: ok(on the host)
        dst[target].copy_(src[source], non_blocking=True)
        page = dst[target] if dst.device == sums.device else src[source]
        sums[number] += (page.to(torch.int64) * weights(len(page), page.device)).sum()
