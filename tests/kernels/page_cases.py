"""Checksums of pages, against their definition in numbers of any length."""

from __future__ import annotations

import torch

from gapless.kernels.pages import FACTOR, MASK
from gapless.kernels.seam import Kernels


def total_of(kernels: Kernels, page: torch.Tensor, before: int = 0) -> int:
    total = torch.tensor(before, device=page.device)
    kernels.page_sum(page, total)
    return int(total)


def check_definition(kernels: Kernels, words: int, device: str, seed: int) -> None:
    page = torch.randint(-(2**31), 2**31, (words,), generator=torch.Generator().manual_seed(seed)).int()
    page[: words // 4] = 2**31 - 1  # the greatest sums
    expected = sum(word * (2 * (place * FACTOR & MASK) + 1) for place, word in enumerate(page.tolist())) + 7
    expected = (expected + 2**63) % 2**64 - 2**63
    assert total_of(kernels, page.to(device), 7) == expected


def check_changes(kernels: Kernels, words: int, device: str, seed: int) -> None:
    """Flips alone and in pairs, opposite ones at the same bit among them, and words that change places are found."""
    generator = torch.Generator().manual_seed(seed)
    page = torch.randint(-(2**31), 2**31, (words,), generator=generator).int()
    sound = total_of(kernels, page.to(device))
    for _ in range(24):
        one, other, bit = torch.randint(0, words, (3,), generator=generator).tolist()
        bit %= 32
        flip = torch.tensor(1 << bit).to(torch.int64).where(torch.tensor(bit < 31), torch.tensor(-(2**31))).int()
        changed = page.clone()
        changed[one] ^= flip
        assert total_of(kernels, changed.to(device)) != sound, "a bit"
        if one != other:
            changed[other] ^= flip
            assert total_of(kernels, changed.to(device)) != sound, "the same bit of two words"
            if page[one] != page[other]:
                swapped = page.clone()
                swapped[[one, other]] = page[[other, one]]
                assert total_of(kernels, swapped.to(device)) != sound, "two words"
