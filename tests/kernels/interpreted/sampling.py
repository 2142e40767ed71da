"""Sampling in Triton's interpreter; run by tests/kernels/test_sampling_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sampling_cases import check_bad_logits, check_greedy, check_independence, check_noise, check_random

# -inf less -inf and so on: what a GPU computes without a word.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


@pytest.mark.parametrize("rows, vocab", [(1, 1), (2, 5), (3, 1024), (2, 3001), (9, 2050)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy(dtype, rows, vocab):
    check_greedy("cpu", dtype, rows, vocab)


@pytest.mark.parametrize("vocab", [7, 2000])
def test_bad_logits(vocab):
    check_bad_logits("cpu", vocab)


@pytest.mark.parametrize("seed", [0, -1, 2**31, -(2**63), 0x1234_5678_9ABC_DEF0])
def test_noise(seed):
    check_noise("cpu", seed, 0)
    check_noise("cpu", seed, 131_071)


def test_draws_are_those_of_torch():
    assert check_random("cpu", torch.float32, 12, 300, 1.0) >= 0.9
    assert check_random("cpu", torch.float32, 3, 2500, 3.0) > 0.6
    assert check_random("cpu", torch.float16, 5, 97, 1.0) > 0.6


def test_independence():
    check_independence("cpu", 9, 1100)
