"""Products of many rows on a GPU: the checks of tests/kernels with real sizes, a chain of them, and under capture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from few_rows_cases import check_chain, random
from many_rows_cases import EPS, Product, check_added, check_alone, check_decode, check_divided, check_operators
from paged import Heads

from gapless.kernels.many_rows import MANY_ROWS
from gapless.kernels.many_rows_triton import Following, launch, tiles_for

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0 or later"),
    # Triton 3.9 says once how its next version will differ.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]

ROWS = [33, 64, 100, 128, 129, 256]
CHAINED = 40


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_divided_by_a_norm_equals_the_direct_computation(rows, early):
    for columns, depth, gated in ((4096, 1024, False), (6144, 1024, True), (1240, 1000, True), (200, 5000, False)):
        product = Product(rows, columns, depth, tiles_for(rows, columns, gated), columns == 1240)
        check_divided("cuda", torch.bfloat16, product, gated, early)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_added_to_the_residual_equals_the_direct_computation(rows, early):
    for columns, depth in ((1024, 2048), (1024, 3072), (4096, 1024), (80, 264)):
        product = Product(rows, columns, depth, tiles_for(rows, columns), columns == 80)
        check_added("cuda", torch.bfloat16, product, early)


@pytest.mark.parametrize("rows", ROWS)
def test_the_operators_compute_what_their_references_do(rows):
    check_operators(MANY_ROWS, "cuda", torch.bfloat16, rows, 1024, 3072)


@pytest.mark.parametrize("heads", [Heads(16, 8, 128), Heads(28, 4, 128), Heads(8, 2, 64)], ids=str)
@pytest.mark.parametrize("rows", [33, 130, 256])
def test_decode_of_many_rows_equals_the_reference(rows, heads):
    lengths = [1, *((2, 700, 16, 17, 255, 1100, 40)[i % 7] for i in range(rows - 1))]
    check_decode(MANY_ROWS, "cuda", torch.bfloat16, heads, lengths, heads.dim == 128)


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_a_row_is_the_same_beside_any_neighbours(rows):
    for columns, depth in ((4096, 1024), (1024, 3072)):
        check_alone("cuda", torch.bfloat16, Product(rows, columns, depth, tiles_for(rows, columns)))


@pytest.mark.parametrize("rows", [64, 256])
def test_a_chain_of_them_is_one_graph(rows):
    """Each product reads what the one before it has just written: none may read too soon, however early it begins."""
    start, norm = random((rows, 1024), torch.bfloat16, "cuda", 1), random((1024,), torch.bfloat16, "cuda", 2)
    wide, narrow = (random(shape, torch.bfloat16, "cuda", 3, 0.03) for shape in ((6144, 1024), (1024, 3072)))
    gated, added = tiles_for(rows, 6144, True), tiles_for(rows, 1024)

    def chain(early: bool) -> Tensor:
        x = start * 1
        scaled, squares = x * norm, x.float().square().view(rows, 16, -1).sum(-1)
        for _ in range(CHAINED):
            y = x.new_empty(rows, 3072)
            launch(scaled, wide, None, y, gated, squares=squares, eps=EPS, gated=True, early=early)
            left = Following(norm, torch.empty_like(x), squares.new_empty(rows, 1024 // added.columns))
            launch(y, narrow, None, x, added, following=left, early=early)
            scaled, squares = left.scaled, left.squares
        return x

    check_chain(chain, start)
