"""Adjusted logits in Triton's interpreter; run by tests/kernels/test_adjust_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from adjust_cases import check_adjust, check_draws

from gapless.kernels import all_triton

# What a GPU computes without a word: exp of a large number, -inf less -inf.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [5, 131, 2500])
def test_slots_hold_the_logits_of_the_definition(vocab, dtype):
    for seed in range(8):
        check_adjust(all_triton.TRITON_KERNELS, vocab, dtype, "cpu", seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_with_a_slot_are_cut_and_drawn_from_it(dtype):
    check_draws(all_triton.TRITON_KERNELS, 1500, dtype, "cpu")
