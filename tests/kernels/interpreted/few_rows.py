"""Products of few rows in Triton's interpreter; run by tests/kernels/test_few_rows_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from few_rows_cases import Product, check_added, check_alone, check_normed, check_operators

from gapless.kernels import linear
from gapless.kernels.few_rows import FewRowsLinear
from gapless.kernels.few_rows_triton import FewRowsTiles

DTYPES = [torch.float32, torch.float16]
# Whole tiles and ragged ones, depth in one part and in several, split and not; a program's part of it at once.
WHOLE = [Product(rows, 32, 64, FewRowsTiles(8, 64, 1)) for rows in (1, 2)] + [
    Product(3, 32, 64, FewRowsTiles(16, 32, 1, 2))
]
RAGGED = [
    Product(1, 26, 52, FewRowsTiles(8, 32, 1)),
    Product(2, 26, 52, FewRowsTiles(8, 32, 1)),
    Product(16, 26, 52, FewRowsTiles(16, 32, 1, 2)),
    Product(17, 22, 40),
]
SPLIT = [Product(2, 40, 96, FewRowsTiles(16, 32, 1, 2, 3)), Product(5, 24, 40, FewRowsTiles(16, 32, 1, 2, 4))]
AT_ONCE = [Product(9, 26, 52, FewRowsTiles(16, 64, 1)), Product(5, 26, 40, FewRowsTiles(16, 32, 1, 1, 2))]


@pytest.mark.parametrize("product", WHOLE + RAGGED + AT_ONCE, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_a_norm_equals_the_direct_computation(dtype, gated, product):
    check_normed("cpu", dtype, product, product in RAGGED, gated, False)


@pytest.mark.parametrize("product", WHOLE + RAGGED + SPLIT + AT_ONCE, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_added_to_the_residual_equals_the_direct_computation(dtype, product):
    check_added("cpu", dtype, product, product not in WHOLE, False)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators_compute_what_their_references_do(dtype, rows):
    check_operators("cpu", dtype, Product(rows, 48, 80))


@pytest.mark.parametrize("rows", [4, 8])
def test_padding_a_batch_changes_nothing(rows):
    check_alone("cpu", torch.float32, Product(rows, 48, 80))


@pytest.mark.parametrize("bias", [None, torch.ones(48)])
def test_no_row_as_of_a_chunk_that_does_not_end_its_prompt(monkeypatch, bias):
    monkeypatch.setattr(linear, "packs", lambda weight: False)
    product = FewRowsLinear(torch.ones(48, 80), bias)
    assert product(torch.ones(0, 80)).shape == product(torch.ones(0, 80), torch.empty(0, 48)).shape == (0, 48)
