"""Products of many rows in Triton's interpreter; run by tests/kernels/test_many_rows_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import fused_reference
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from many_rows_cases import Product, check_added, check_alone, check_decode, check_divided, check_operators
from paged import Heads

from gapless.kernels import many_rows
from gapless.kernels.many_rows_triton import ManyRowsTiles

DTYPES = [torch.float32, torch.float16]
# Whole tiles and ragged ones.
WHOLE = Product(32, 64, 64, ManyRowsTiles(32, 32, 32, 1, 2))
RAGGED = Product(37, 80, 72, ManyRowsTiles(16, 32, 32, 1, 2), biased=True)
DEEP = Product(37, 40, 104, ManyRowsTiles(32, 16, 16, 1, 2), biased=True)


@pytest.mark.parametrize("product", [WHOLE, RAGGED], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_divided_by_a_norm_equals_the_direct_computation(dtype, gated, product):
    check_divided("cpu", dtype, product, gated, False)


@pytest.mark.parametrize("product", [WHOLE, RAGGED, DEEP], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_added_to_the_residual_equals_the_direct_computation(dtype, product):
    check_added("cpu", dtype, product, False)


@pytest.mark.parametrize("rows", [33, 70, 130])
def test_the_operators_compute_what_their_references_do(rows):
    check_operators(many_rows.MANY_ROWS, "cpu", torch.float32, rows, 64, 96)
    check_operators(fused_reference.MANY_ROWS, "cpu", torch.float32, rows, 64, 96)


@pytest.mark.parametrize("product", [WHOLE, DEEP], ids=str)
def test_a_row_is_the_same_beside_any_neighbours(product):
    check_alone("cpu", torch.float32, product)


@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 24)], ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_many_rows_equals_the_reference(dtype, norm, heads):
    """Rows whose neighbours begin pages, end them, and are one entry long."""
    lengths = [1, 2, 16, 17, 70, *range(3, 40)]
    check_decode(many_rows.MANY_ROWS, "cpu", dtype, heads, lengths, norm)
