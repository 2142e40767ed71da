"""Masks in Triton's interpreter; run by tests/kernels/test_masks_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from mask_cases import check_expected, check_mask, check_reply

from gapless.kernels import all_triton


@pytest.mark.parametrize(("vocab", "places"), [(5, 1), (32, 5), (131, 1), (131, 9), (2500, 3)])
def test_a_row_loses_what_its_mask_leaves_out_and_is_late_without_one(vocab, places):
    for seed in range(8):
        check_mask(all_triton.TRITON_KERNELS, vocab, "cpu", seed, places)


@pytest.mark.parametrize("width", [1, 3, 9])
def test_a_live_row_that_got_a_token_has_it_in_its_mail(width):
    for seed in range(8):
        check_reply(all_triton.TRITON_KERNELS, 131, "cpu", seed, width)


@pytest.mark.parametrize("width", [2, 5, 9])
def test_a_row_that_got_what_was_expected_drafts_what_is_expected_next(width):
    for seed in range(12):
        check_expected(all_triton.TRITON_KERNELS, 131, "cpu", seed, width)
