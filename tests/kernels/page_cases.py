"""Copies of pages and their checksums, against their definition in numbers of any length."""

from __future__ import annotations

import torch

from gapless.kernels.pages import FACTOR, MASK
from gapless.kernels.seam import Kernels

ORDER = ((4, 0, 2), (1, 3, 0))
"""Rows that are copied, and where they go"""


def copied(
    kernels: Kernels, rows: torch.Tensor, device: str, out: bool, before: int = 0
) -> tuple[torch.Tensor, list[int]]:
    """Copy rows in ORDER, on a GPU out to pinned memory or in from there; return the destination and the sums."""
    pinned = device == "cuda"
    dst = torch.zeros(len(rows), rows.shape[1] + 4, dtype=rows.dtype)[:, :-4]  # slots have gaps between them
    src = rows.to(device) if out or not pinned else rows.pin_memory()
    dst = dst.to(device) if not (out and pinned) else torch.zeros_like(dst).pin_memory()
    places = torch.tensor(ORDER, dtype=torch.int32)
    sums = torch.full((len(ORDER[0]),), before, device=device)
    kernels.copy_pages(src, dst, places.pin_memory() if pinned else places, sums)
    return dst.cpu(), sums.tolist()


def total_of(kernels: Kernels, page: torch.Tensor, device: str) -> int:
    return copied(kernels, page.expand(5, -1).contiguous(), device, False)[1][0]


def check_definition(kernels: Kernels, words: int, device: str, seed: int, out: bool) -> None:
    rows = torch.randint(-(2**31), 2**31, (5, words), generator=torch.Generator().manual_seed(seed)).int()
    rows[:, : words // 4] = 2**31 - 1  # the greatest sums
    dst, sums = copied(kernels, rows, device, out, 7)
    for source, target, found in zip(*ORDER, sums, strict=True):
        assert torch.equal(dst[target], rows[source])
        expected = sum(word * (2 * (place * FACTOR & MASK) + 1) for place, word in enumerate(rows[source].tolist())) + 7
        assert found == (expected + 2**63) % 2**64 - 2**63
    assert not dst[[row for row in range(5) if row not in ORDER[1]]].any(), "other rows stay as they are"


def check_changes(kernels: Kernels, words: int, device: str, seed: int) -> None:
    """Flips alone and in pairs, opposite ones at the same bit among them, and words that change places are found."""
    generator = torch.Generator().manual_seed(seed)
    page = torch.randint(-(2**31), 2**31, (words,), generator=generator).int()
    sound = total_of(kernels, page, device)
    for _ in range(24):
        one, other, bit = torch.randint(0, words, (3,), generator=generator).tolist()
        bit %= 32
        flip = torch.tensor(1 << bit).to(torch.int64).where(torch.tensor(bit < 31), torch.tensor(-(2**31))).int()
        changed = page.clone()
        changed[one] ^= flip
        assert total_of(kernels, changed, device) != sound, "a bit"
        if one != other:
            changed[other] ^= flip
            assert total_of(kernels, changed, device) != sound, "the same bit of two words"
            if page[one] != page[other]:
                swapped = page.clone()
                swapped[[one, other]] = page[[other, one]]
                assert total_of(kernels, swapped, device) != sound, "two words"
