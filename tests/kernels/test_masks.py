"""Masks of the torch and C++ kernels, against their definition."""

from __future__ import annotations

import pytest
from mask_cases import check_expected, check_mask, check_reply

from gapless.kernels import native, plain
from gapless.kernels.seam import Kernels


def both() -> list[Kernels]:
    compiled = native.load()
    if compiled is None:
        pytest.skip("the C++ kernels are not built")
    return [plain.KERNELS, compiled]


@pytest.mark.parametrize("vocab", [5, 32, 131, 70_001])
@pytest.mark.parametrize("places", [1, 5, 9])
def test_a_row_loses_what_its_mask_leaves_out_and_is_late_without_one(vocab: int, places: int) -> None:
    for kernels in both():
        for seed in range(20 if vocab < 1000 else 4):
            check_mask(kernels, vocab, "cpu", seed, places)


@pytest.mark.parametrize("width", [1, 3, 9])
def test_a_live_row_that_got_a_token_has_it_in_its_mail(width: int) -> None:
    for kernels in both():
        for seed in range(20):
            check_reply(kernels, 131, "cpu", seed, width)


@pytest.mark.parametrize("width", [2, 5, 9])
def test_a_row_that_got_what_was_expected_drafts_what_is_expected_next(width: int) -> None:
    for kernels in both():
        for seed in range(40):
            check_expected(kernels, 131, "cpu", seed, width)
