"""Copies of pages and their checksums by the torch and C++ kernels."""

from __future__ import annotations

import pytest
import torch
from page_cases import check_changes, check_definition, total_of

from gapless.kernels import native, plain
from gapless.kernels.pages import weights
from gapless.kernels.seam import Kernels


def both() -> list[Kernels]:
    compiled = native.load()
    if compiled is None:
        pytest.skip("the C++ kernels are not built")
    return [plain.KERNELS, compiled]


@pytest.mark.parametrize("words", [1, 7, 64, 5000, 1 << 19])
def test_rows_are_copied_and_each_word_counts_by_its_place(words: int) -> None:
    for kernels in both():
        check_definition(kernels, words, "cpu", words, True)


@pytest.mark.parametrize("words", [2, 33, 5000])
def test_flips_in_pairs_and_words_that_change_places_are_found(words: int) -> None:
    for kernels in both():
        for seed in range(8):
            check_changes(kernels, words, "cpu", seed)


def test_a_page_that_is_not_there_is_not_copied_in_cpp() -> None:
    src, dst, sums = torch.ones(2, 3).int(), torch.zeros(2, 3).int(), torch.zeros(1, dtype=torch.int64)
    for places in ([[2], [0]], [[0], [-1]]):
        with pytest.raises(RuntimeError, match="a page that is not there"):
            both()[1].copy_pages(src, dst, torch.tensor(places, dtype=torch.int32), sums)
    assert not dst.any()


def test_no_two_words_of_a_page_count_the_same() -> None:
    found = weights(1 << 20, torch.device("cpu"))
    assert len(found.unique()) == len(found) and (found % 2 == 1).all() and found.min() > 0 and found.max() < 2**31


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_pages_of_odd_sizes_have_smaller_words(dtype: torch.dtype) -> None:
    page = torch.tensor([1, 2, 3], dtype=dtype)
    found = {total_of(kernels, page, "cpu") for kernels in both()}
    assert found == {int((page.long() * weights(3, page.device)).sum())}
