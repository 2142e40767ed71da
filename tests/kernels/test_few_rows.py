"""Products of few rows in Triton against float64, and against the same product made in separate steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from implementations import BF16, F32, TRITON, runs
from products import EPS, Shape, close, expected, operands, random
from products import gated as gated_by
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from gapless.kernels import few_rows, few_rows_triton, linear
from gapless.kernels.few_rows import FewRowsLinear
from gapless.kernels.linear import TorchLinear
from gapless.kernels.matrix import Linear
from gapless.kernels.seam import LayerProduct
from gapless.kernels.tiles import FewRowsTiles
from gapless.kernels.views import LayerRows

Product = tuple[Shape, FewRowsTiles | None]
"""With the tiles that the engine takes, if none are given"""
# Whole tiles and ragged ones, depth in one part and in several, split and not; a program's part of it at once.
WHOLE = [
    (Shape(3, 32, 64), FewRowsTiles(16, 32, 1, 2)),
    *((Shape(rows, 32, 64), FewRowsTiles(8, 64, 1)) for rows in (1, 2)),
]
RAGGED = [
    (Shape(2, 26, 52), FewRowsTiles(8, 32, 1)), (Shape(16, 26, 52), FewRowsTiles(16, 32, 1, 2)),
    (Shape(17, 22, 40), None), (Shape(1, 26, 52), FewRowsTiles(8, 32, 1)),
]  # fmt: skip
SPLIT = [(Shape(2, 40, 96), FewRowsTiles(16, 32, 1, 2, 3)), (Shape(5, 24, 40), FewRowsTiles(16, 32, 1, 2, 4))]
AT_ONCE = [(Shape(9, 26, 52), FewRowsTiles(16, 64, 1)), (Shape(5, 26, 40), FewRowsTiles(16, 32, 1, 1, 2))]
ROWS = [1, 2, 3, 7, 16, 17, 32]
SPLIT_TILES = [FewRowsTiles(16, 256, 4, 3, 4), FewRowsTiles(64, 128, 4, 4, 8), FewRowsTiles(16, 128, 2, 3, 3)]
EARLY = [False, True] if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else [False]
"""A kernel begins before the one in front has ended from Hopper on."""
CHAINED = 40


def check_normed(device: str, dtype: torch.dtype, product: Product, biased: bool, gated: bool, early: bool) -> None:
    shape, tiles = product
    x, layer, norm = operands(device, dtype, shape, biased)
    if shape.rows > 1:
        x[0] = 0.0  # what an inert row may hold
    out = x.new_full((shape.rows, shape.columns // (2 if gated else 1)), float("nan"))
    few_rows_triton.launch(x, layer.weight, layer.bias, out, norm=norm, eps=EPS, gated=gated, tiles=tiles, early=early)
    want = expected(x, layer, norm)
    if gated:
        want = gated_by(want)
    close(out, want)


def check_added(device: str, dtype: torch.dtype, product: Product, biased: bool, early: bool) -> None:
    """Twice in a row: what the first leaves behind does not disturb the second, and both give the same."""
    shape, tiles = product
    y, layer, _ = operands(device, dtype, shape, biased)
    before = random((shape.rows, shape.columns), dtype, device, 5)
    want = before.double() + expected(y, layer, None)
    found = []
    for _ in range(2):
        x = before.clone()
        few_rows_triton.launch(y, layer.weight, layer.bias, x, add=True, tiles=tiles, early=early)
        close(x, want)
        found.append(x)
    assert torch.equal(*found)


def check_operators(device: str, dtype: torch.dtype, shape: Shape) -> None:
    """Every operator with the tiles of the engine, beside the direct computation."""
    x, layer, norm = operands(device, dtype, shape, True)
    rows = LayerRows(*[torch.empty(0)] * 4)
    ops, product, want = few_rows.FewRowsOps(x, rows, EPS), LayerProduct(layer), expected(x, layer, norm)
    close(ops.product(ops.norm(norm), product), want)
    close(ops.gated(ops.norm(norm), product), gated_by(want))
    if shape.rows == 1:
        out = x.new_empty(1, len(layer.weight))
        few_rows.triton_one_row_linear(x, layer.weight, layer.bias, out)
        close(out, expected(x, layer, None))
    before = random((shape.rows, shape.columns), dtype, device, 5)
    ops = few_rows.FewRowsOps(before.clone(), rows, EPS)
    assert ops.add(x, product, norm) is norm
    close(ops.x, before.double() + expected(x, layer, None))
    check_shared(x, before, product, norm)


class EqualRanks:
    """Two ranks with equal parts, seen by one."""

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        x.add_(2 * y)
        return few_rows.triton_rms_norm(x, weight, eps)


def check_shared(x: Tensor, before: Tensor, product: LayerProduct, norm: Tensor) -> None:
    """The operations of a rank with a share of the layer."""
    rows, layer = LayerRows(*[torch.empty(0)] * 4), product.linear
    assert isinstance(layer, TorchLinear)
    ops = few_rows.SharedFewRowsOps(EqualRanks(), x.clone(), rows, EPS)  # type: ignore[arg-type]
    normed = ops.norm(norm)
    close(ops.product(normed, product), expected(normed, layer, None))
    close(ops.gated(normed, product), gated_by(expected(normed, layer, None)))
    after = torch.ones(len(layer.weight), device=x.device)
    ops = few_rows.SharedFewRowsOps(EqualRanks(), before.clone(), rows, EPS)  # type: ignore[arg-type]
    y = ops.end(ops.add(x, product, after))
    close(ops.x, before.double() + 2 * expected(x, layer, None))
    close(y, few_rows.triton_rms_norm(ops.x, after, EPS).double())


def check_alone(device: str, dtype: torch.dtype, shape: Shape) -> None:
    """A row's result is that of the batch padded to the next power of two."""
    x, layer, norm = operands(device, dtype, shape, False)
    whole = few_rows.triton_normed_linear(x, norm, EPS, layer.weight, None, False)
    for rows in {shape.rows // 2 + 1, shape.rows - 1}:
        part = few_rows.triton_normed_linear(x[:rows], norm, EPS, layer.weight, None, False)
        assert torch.equal(part, whole[:rows])


def check_chain(chain: Callable[[bool], Tensor], start: Tensor, early: bool = True) -> None:
    """A chain of products that each read what the one before has just written gives the same whether they begin early
    or not, also as one graph."""
    want = chain(False)
    assert want.isfinite().all() and not torch.equal(want, start)
    assert torch.equal(chain(early), want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(early)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, want)


@runs("product", [*WHOLE, *RAGGED, *AT_ONCE], on=("interpreter",), keep=4)
def test_a_product_of_a_norm_equals_the_direct_computation(implementation, product):
    for dtype in implementation.dtypes:
        for gated in (False, True):
            check_normed("cpu", dtype, product, product in RAGGED, gated, False)


@runs("product", [*SPLIT, *RAGGED, *WHOLE, *AT_ONCE], on=("interpreter",), keep=4)
def test_a_product_added_to_the_residual_equals_the_direct_computation(implementation, product):
    for dtype in implementation.dtypes:
        check_added("cpu", dtype, product, product not in WHOLE, False)


@runs("rows", on=("cuda",), cuda=ROWS)
@pytest.mark.parametrize("early", EARLY)
def test_products_of_a_real_size_equal_the_direct_computation(implementation, rows, early):
    for columns, depth, gated in [(4096, 1024, False), (6144, 1024, True), (1234, 1000, True), (200, 5000, False)]:
        check_normed("cuda", BF16, (Shape(rows, columns, depth), None), columns == 1234, gated, early)
    for columns, depth in [(1024, 2048), (1024, 3072), (4096, 12288), (77, 264)]:
        check_added("cuda", BF16, (Shape(rows, columns, depth), None), columns == 77, early)
    for tiles in SPLIT_TILES if rows > 1 else ():
        check_added("cuda", BF16, (Shape(rows, 1024, 3072), tiles), True, early)


@runs(
    "shape",
    on=TRITON,
    interpreter=[Shape(rows, 48, 80) for rows in (1, 2, 4)],
    cuda=[Shape(rows, 2048, 1024) for rows in ROWS],
)
def test_the_operators_compute_the_same_as_torch(implementation, shape):
    for dtype in implementation.dtypes if implementation.name == "interpreter" else (BF16,):
        check_operators(implementation.device, dtype, shape)


@runs(
    "shape", on=TRITON, interpreter=[Shape(4, 48, 80), Shape(8, 48, 80)],
    cuda=[Shape(rows, *size) for rows in (4, 8, 16, 32) for size in ((4096, 1024), (1024, 3072))],
)  # fmt: skip
def test_padding_a_batch_changes_nothing(implementation, shape):
    check_alone(implementation.device, F32 if implementation.name == "interpreter" else BF16, shape)


@runs("bias", [None, torch.ones(48)], on=("interpreter",))
def test_a_chunk_that_does_not_end_its_prompt_has_no_row(implementation, bias, monkeypatch):
    monkeypatch.setattr(linear, "packs", lambda weight: False)
    product = FewRowsLinear(torch.ones(48, 80), bias)
    assert product(torch.ones(0, 80)).shape == product(torch.ones(0, 80), torch.empty(0, 48)).shape == (0, 48)


@runs("rows", on=("cuda",), cuda=[1, 4, 16, 32])
@pytest.mark.parametrize("early", EARLY)
def test_a_chain_of_products_of_few_rows_is_one_graph(implementation, rows, early):
    """None reads the one before it too soon, however early it begins."""
    start = random((rows, 1024), BF16, "cuda", 1)
    norm = random((1024,), BF16, "cuda", 2)
    wide, narrow = (random(shape, BF16, "cuda", 3, 0.03) for shape in ((6144, 1024), (1024, 3072)))
    split = FewRowsTiles(16, 128, 4, 3, 4) if rows > 1 else None

    def chain(early: bool) -> Tensor:
        x = start * 1
        for _ in range(CHAINED):
            y = x.new_empty(rows, 3072)
            few_rows_triton.launch(x, wide, None, y, norm=norm, eps=EPS, gated=True, early=early)
            few_rows_triton.launch(y, narrow, None, x, add=True, tiles=split, early=early)
        return x

    check_chain(chain, start, early)


def test_large_models_and_other_layouts_have_their_own_products() -> None:
    """One row is served by plain weights of any size."""

    def served(*products: Linear) -> int:
        return few_rows.most_rows([LayerProduct(product) for product in products])

    def layer(columns: int, depth: int) -> TorchLinear:
        return TorchLinear(torch.empty(columns, depth, dtype=torch.bfloat16, device="meta"))

    small = layer(6144, 1024)
    most = [served(small, layer(*shape)) for shape in ((12288, 2048), (19456, 2560), (24576, 4096))]
    assert most == [32, 32, 1]
    assert served(small, lambda x, out=None: x) == 0
