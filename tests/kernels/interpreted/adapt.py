"""Adapters in Triton's interpreter; run by tests/kernels/test_adapt.py."""

from __future__ import annotations

import sys
from pathlib import Path

import fused_reference
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from adapt_cases import (
    FewShape,
    RotatedShape,
    check_adapt,
    check_alone,
    check_few,
    check_few_alone,
    check_joined,
    check_joined_decode,
    check_rotated,
)
from paged import Heads

from gapless.kernels import adapt_fused_triton, adapt_triton, all_triton, few_rows, few_rows_triton, many_rows
from gapless.kernels.joined_rows import JOINED_ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 3), (33, 8)])
def test_it_adds_what_the_definition_says(tokens, slots, dtype):
    for seed in range(2):
        check_adapt(all_triton.TRITON_KERNELS, dtype, "cpu", tokens, slots, seed)


def test_so_it_does_in_larger_blocks(monkeypatch):
    monkeypatch.setattr(adapt_triton, "MANY_TOKENS", 64)
    check_adapt(all_triton.TRITON_KERNELS, torch.float32, "cpu", 70, 3, 0)


def test_a_token_is_alone():
    check_alone(all_triton.TRITON_KERNELS, torch.float32, "cpu")


@pytest.mark.parametrize("ways", [few_rows.ADAPTED_ROWS, fused_reference.ADAPTED_ROWS], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        FewShape(1, 64, (40, 24), 48), FewShape(2, 64, (40, 24), 48), FewShape(3, 80, (48,), 40, 32),
        FewShape(7, 100, (70, 30, 30), 52), FewShape(13, 48, (24, 24), 40),
    ],
)  # fmt: skip
def test_a_layer_of_few_rows_adds_what_the_definition_says(shape, dtype, ways):
    check_few(ways, dtype, "cpu", shape)


@pytest.mark.parametrize("ways", [many_rows.MANY_ADAPTED, fused_reference.MANY_ADAPTED], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [FewShape(7, 80, (72, 24, 24), 40, 32), FewShape(70, 136, (48,), 200)])
def test_a_layer_of_many_rows_adds_what_the_definition_says(shape, dtype, ways):
    check_few(ways, dtype, "cpu", shape)


@pytest.mark.parametrize("ways", [many_rows.MANY_ADAPTED, fused_reference.MANY_ADAPTED], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [RotatedShape(1, 2, 2, 16), RotatedShape(7, 5, 1, 24, 32), RotatedShape(6, 6, 3, 8)])
def test_rotation_adds_what_the_definition_says(shape, dtype, ways):
    check_rotated(ways, dtype, "cpu", shape)


@pytest.mark.parametrize("ways", [JOINED_ROWS, fused_reference.JOINED_ROWS], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [FewShape(1, 64, (40, 24), 48), FewShape(7, 80, (72, 24, 24), 40, 32)])
def test_a_joined_product_and_its_second_half_are_what_the_definition_says(shape, dtype, ways):
    check_joined(ways, dtype, "cpu", shape)


@pytest.mark.parametrize("ways", [JOINED_ROWS, fused_reference.JOINED_ROWS], ids=["triton", "torch"])
def test_joined_queries_keys_and_values_are_read_as_plain_torch_does(ways):
    check_joined_decode(ways, torch.float32, "cpu", Heads(4, 2, 16), [9, 2, 16, 17, 5])


def test_it_adds_the_same_in_parts(monkeypatch):
    """Several shares of the inputs, several parts of the ranks, and several splits of the product."""
    monkeypatch.setattr(adapt_fused_triton, "MOST_INPUTS", {32: 512})
    monkeypatch.setattr(adapt_fused_triton, "HELD", 512)
    tiles = few_rows_triton.FewRowsTiles(64, 32, 1, 2, 3)
    monkeypatch.setattr(few_rows_triton, "tiles_for", lambda rows, *_: tiles)
    check_few(few_rows.ADAPTED_ROWS, torch.float32, "cpu", FewShape(5, 64, (40, 12, 12), 560, 32))


@pytest.mark.parametrize("rows", [2, 5, 10])
def test_a_row_of_few_is_alone(rows, monkeypatch):
    monkeypatch.setattr(adapt_fused_triton, "MOST_HELD", 5)
    check_few_alone(few_rows.ADAPTED_ROWS, torch.float32, "cpu", rows)


def test_a_row_of_many_is_alone():
    check_few_alone(many_rows.MANY_ADAPTED, torch.float32, "cpu", 5)
