"""The beginning and the end of a step in Triton's interpreter; run by tests/kernels/test_step_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from step_cases import SLOTS, check_begin_decode, check_begin_mixed, check_finish

from gapless.kernels import mixed_triton


@pytest.mark.parametrize(
    "used, padding, writes", [(1, 0, 0), (1, 0, 1), (0, 4, 2), (3, 5, 40), (32, 0, 7), (40, 3, 40), (70, 58, 100)]
)
def test_the_begin_of_a_decode_step_equals_the_reference(used, padding, writes):
    for seed in range(2):
        check_begin_decode("cpu", seed, 80, used, padding, writes)


@pytest.mark.parametrize("used, padding", [(1, 0), (0, 3), (5, 3), (32, 0), (61, 4)])
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("width", [1, 5, 9])
def test_the_finish_of_a_step_equals_the_reference(used, padding, chunks, width):
    lines = torch.empty(SLOTS, 12 * 80, dtype=torch.int32)
    for seed in range(4):
        check_finish("cpu", seed, 80, used, padding, chunks=chunks, lines=lines, width=width)


@pytest.mark.parametrize(
    "decode, chunks, spare, new",
    [
        (0, [1], 0, 0),
        (0, [40], 5, 1),
        (3, [7, 1, 30], 0, 2),
        (30, [5, 2, 8, 40], 300, 4),
        (2, [3, 3], 1, 0),
        (0, [0, 0, 9], 3, 1),
    ],
)
def test_the_begin_of_a_mixed_step_equals_the_reference(decode, chunks, spare, new):
    for seed in range(2):
        check_begin_mixed("cpu", seed, 50, decode, chunks, spare, new)


def test_the_begin_of_a_mixed_step_in_small_programs_equals_the_reference(monkeypatch):
    """So that each goes over its row's tokens several times."""
    monkeypatch.setattr(mixed_triton, "MIXED_BLOCK", 8)
    monkeypatch.setattr(mixed_triton, "SPLITS", 2)
    check_begin_mixed("cpu", 0, 50, 3, [40, 33, 17], 50, 2)
