"""Adapters in Triton's interpreter; run by tests/kernels/test_adapt.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from adapt_cases import check_adapt, check_alone

from gapless.kernels import adapt_triton, all_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 3), (33, 8)])
def test_it_adds_what_the_definition_says(tokens, slots, dtype):
    for seed in range(2):
        check_adapt(all_triton.KERNELS, dtype, "cpu", tokens, slots, seed)


def test_so_it_does_in_larger_blocks(monkeypatch):
    monkeypatch.setattr(adapt_triton, "MANY_TOKENS", 64)
    check_adapt(all_triton.KERNELS, torch.float32, "cpu", 70, 3, 0)


def test_a_token_is_alone():
    check_alone(all_triton.KERNELS, torch.float32, "cpu")
