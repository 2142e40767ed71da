"""Products of few rows on a GPU: the checks of tests/kernels with real sizes, a chain of them, and under capture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from few_rows_cases import EPS, Product, check_added, check_alone, check_chain, check_normed, check_operators
from fused_cases import random

from gapless.kernels import few_rows_triton
from gapless.kernels.few_rows_triton import FewRowsTiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
    # Triton 3.9 says once how its next version will differ.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]

ROWS = [1, 2, 3, 7, 16, 17, 32]
NORMED = [(4096, 1024, False), (6144, 1024, True), (1234, 1000, True), (200, 5000, False)]
ADDED = [(1024, 2048), (1024, 3072), (4096, 12288), (77, 264)]
SPLIT = [FewRowsTiles(16, 256, 4, 3, 4), FewRowsTiles(64, 128, 4, 4, 8), FewRowsTiles(16, 128, 2, 3, 3)]
EARLY = [False, pytest.param(True, marks=pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper or later"
))]  # fmt: skip
CHAINED = 40


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_of_a_norm_equals_the_direct_computation(rows, early):
    for columns, depth, gated in NORMED:
        check_normed("cuda", torch.bfloat16, Product(rows, columns, depth), columns == 1234, gated, early)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("rows", ROWS)
def test_a_product_added_to_the_residual_equals_the_direct_computation(rows, early):
    for columns, depth in ADDED:
        check_added("cuda", torch.bfloat16, Product(rows, columns, depth), columns == 77, early)
    for tiles in SPLIT if rows > 1 else ():
        check_added("cuda", torch.bfloat16, Product(rows, 1024, 3072, tiles), True, early)


def test_the_operators_compute_what_torch_does():
    for rows in ROWS:
        check_operators("cuda", torch.bfloat16, Product(rows, 2048, 1024))


@pytest.mark.parametrize("rows", [4, 8, 16, 32])
def test_padding_a_batch_changes_nothing(rows):
    check_alone("cuda", torch.bfloat16, Product(rows, 4096, 1024))
    check_alone("cuda", torch.bfloat16, Product(rows, 1024, 3072))


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("rows", [1, 4, 16, 32])
def test_a_chain_of_them_is_one_graph(rows, early):
    """Each product reads what the one before it has just written: none may read too soon, however early it begins."""
    start = random((rows, 1024), torch.bfloat16, "cuda", 1)
    norm = random((1024,), torch.bfloat16, "cuda", 2)
    wide, narrow = (random(shape, torch.bfloat16, "cuda", 3, 0.03) for shape in ((6144, 1024), (1024, 3072)))
    split = FewRowsTiles(16, 128, 4, 3, 4) if rows > 1 else None

    def chain(early: bool) -> Tensor:
        x = start * 1
        for _ in range(CHAINED):
            y = x.new_empty(rows, 3072)
            few_rows_triton.launch(x, wide, None, y, norm=norm, eps=EPS, gated=True, early=early)
            few_rows_triton.launch(y, narrow, None, x, add=True, tiles=split, early=early)
        return x

    check_chain(chain, start, early)
