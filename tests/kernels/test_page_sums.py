"""Copies of pages and their checksums, against their definition in numbers of any length."""

from __future__ import annotations

import pytest
import torch
from implementations import CPU, made, runs

from gapless.kernels.pages import FACTOR, MASK, weights
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


@runs("words", [1, 7, 5000], cpu=[64, 1 << 19], interpreter=[4096, 4097], cuda=[4097, 1 << 19])
@pytest.mark.parametrize("out", [True, False])
def test_rows_are_copied_and_each_word_counts_by_its_place(implementation, words, out):
    check_definition(implementation.kernels, words, implementation.device, words, out)


@runs("words, programs", [(7, 8), (70_000, 2), (70_000, 8)], on=("interpreter",))
def test_rows_are_stored_by_several_programs(implementation, words, programs, monkeypatch):
    from gapless.kernels import pages_triton

    monkeypatch.setattr(pages_triton, "STORING", programs)  # memory of the CPU is stored to
    check_definition(implementation.kernels, words, "cpu", words, True)


@runs("words", [33, 5000], cpu=[2])
def test_flips_in_pairs_and_words_that_change_places_are_found(implementation, words):
    for seed in range(8 if implementation.name in CPU else 1):
        check_changes(implementation.kernels, words, implementation.device, seed)


def test_a_page_that_is_not_there_is_not_copied_in_cpp() -> None:
    src, dst, sums = torch.ones(2, 3).int(), torch.zeros(2, 3).int(), torch.zeros(1, dtype=torch.int64)
    for places in ([[2], [0]], [[0], [-1]]):
        with pytest.raises(RuntimeError, match="a page that is not there"):
            made("native").kernels.copy_pages(src, dst, torch.tensor(places, dtype=torch.int32), sums)
    assert not dst.any()


def test_no_two_words_of_a_page_count_the_same() -> None:
    found = weights(1 << 20, torch.device("cpu"))
    assert len(found.unique()) == len(found) and (found % 2 == 1).all() and found.min() > 0 and found.max() < 2**31


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_pages_of_odd_sizes_have_smaller_words(dtype: torch.dtype) -> None:
    page = torch.tensor([1, 2, 3], dtype=dtype)
    found = {total_of(made(name).kernels, page, "cpu") for name in CPU}
    assert found == {int((page.long() * weights(3, page.device)).sum())}
