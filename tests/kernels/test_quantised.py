"""Products by quantised weights in Triton against float64 of the same weight, multiplied out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implementations import BF16, F32, TRITON, runs
from products import EPS, Shape, close, normed, random
from products import gated as gated_by
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from gapless.kernels import quantised_linear
from gapless.kernels.coded_triton import CodeTiles, RowTiles, launch_codes
from gapless.kernels.fp8_rows_triton import fp8_rows
from gapless.kernels.kinds import DENSE, WeightKind, WeightLayout
from gapless.kernels.linear import TorchLinear
from gapless.kernels.matrix import Matrix, round_to
from gapless.kernels.quantised_linear import CODED_PRODUCTS, CODES, CodedLinear, CodedOps
from gapless.kernels.seam import LayerProduct
from gapless.kernels.views import LayerRows

FP8, INT8, INT4 = WeightKind.FP8, WeightKind.INT8, WeightKind.INT4
LAYOUTS = [WeightLayout(kind, group) for kind in (FP8, INT8, INT4) for group in (0, 128, 32, 64)]
# Columns and depth that no tile divides, a short last group, and a depth of several programs.
ONE, SEVERAL, WIDE = Shape(1, 26, 160), Shape(3, 26, 160), Shape(18, 22, 288)
ROUNDED = 4e-2
"""Most of a result's error over its norm if inputs are rounded to three bits"""
CASES = [
    *((layout, ONE, RowTiles(4, 2, 16, 1)) for layout in LAYOUTS[:9:4]),
    *((layout, SEVERAL, None) for layout in LAYOUTS[1:12:4]),
    *((layout, ONE, RowTiles(4, 3, 4, 1)) for layout in LAYOUTS[1:]),
    *((layout, WIDE, None) for layout in LAYOUTS),
]


def coded(layout: WeightLayout, shape: Shape, dtype: torch.dtype, device: str = "cpu", biased: bool = True) -> Matrix:
    """A weight with every code of its kind, and results about one in size."""
    weight = random((shape.columns, shape.depth), F32, "cpu", 2, shape.depth**-0.5)
    tensors = list(round_to(layout, weight))
    codes = tensors[0].view(torch.uint8)
    every = [code for code in range(256) if layout.kind is not FP8 or code & 127 != 127]
    size = min(len(every), codes.shape[1])
    codes[0, :size] = torch.tensor(every[-size:], dtype=torch.uint8)
    codes[1, :size] = torch.tensor(every[:size], dtype=torch.uint8)
    tensors[1][:2] *= 0.1
    bias = random((shape.columns,), dtype, device, 3) if biased else None
    return Matrix(tuple(tensor.to(device) for tensor in tensors), bias, layout, dtype)


def result(matrix: Matrix, x: Tensor, norm: Tensor | None = None) -> Tensor:
    """In float64."""
    found = (x.double() if norm is None else normed(x, norm)) @ matrix.values().double().T
    return found if matrix.bias is None else found + matrix.bias.double()


def launch(matrix: Matrix, x: Tensor, out: Tensor, **how: Any) -> None:
    codes, scale, *zero = matrix.tensors
    kind = CODES[matrix.layout.kind]
    launch_codes(
        x, codes.view(torch.uint8), scale, zero[0] if zero else None, matrix.bias, out, kind, matrix.layout.group, **how
    )


def tiles_of(layout: WeightLayout, splits: int) -> CodeTiles:
    return CodeTiles(16, 16, min(layout.group or 64, 64), 1, 2, splits)


@runs("layout, shape, tiles", CASES, on=("interpreter",), keep=6)
def test_a_product_by_codes_equals_that_by_the_weight_multiplied_out(implementation, layout, shape, tiles):
    """With the norm before it, its gate, and added to a residual, whose second half of splits changes nothing."""
    for dtype in (implementation.half,) if shape.rows == 1 else implementation.dtypes:
        x, matrix = random((shape.rows, shape.depth), dtype, "cpu", 1, 2.0), coded(layout, shape, dtype)
        norm = random((shape.depth,), F32, "cpu", 4, 0.3) + 1
        for gated in (False, True):
            out = x.new_full((shape.rows, shape.columns // (2 if gated else 1)), float("nan"))
            own = tiles or tiles_of(layout, 1)
            launch(matrix, x, out, norm=norm, eps=EPS, gated=gated, tiles=own, early=False)
            want = result(matrix, x, norm)
            close(out, gated_by(want) if gated else want)
        before = random((shape.rows, shape.columns), dtype, "cpu", 5)
        out = before.clone()
        launch(matrix, x, out, add=True, tiles=tiles or tiles_of(layout, 2), early=False)
        close(out, before.double() + result(matrix, x))


def near(found: Tensor, wanted: Tensor, rounded: bool) -> None:
    """Whether results agree, or in their norm if inputs were rounded to E4M3."""
    if rounded:
        assert (found.double() - wanted).norm() < ROUNDED * wanted.norm()
    else:
        close(found, wanted)


@runs(
    "layout", on=TRITON, interpreter=[WeightLayout(FP8, 128), WeightLayout(INT8), WeightLayout(INT4, 32)], cuda=LAYOUTS
)
def test_a_layer_of_codes_serves_any_number_of_rows(implementation, layout):
    """One row, few, and so many that the weight is decoded before it is multiplied; and none."""
    device, dtype = implementation.device, implementation.half
    shape = Shape(1, 48, 160) if device == "cpu" else Shape(1, 1040, 1184)
    for biased in (False, True):
        matrix = coded(layout, shape, dtype, device, biased)
        layer = CODED_PRODUCTS[layout.kind].of(matrix)
        assert layer is not None and layer.kind is layout.kind
        for rows in (0, 1, 3, 70) if device == "cpu" else (0, 1, 2, 16, 17, 32, 64, 65, 300, 600):
            x = random((rows, shape.depth), dtype, device, 1, 2.0)
            for found in (layer(x), layer(x, x.new_full((rows, shape.columns), float("nan")))):
                assert found.shape == (rows, shape.columns)
                near(found, result(matrix, x), layer.rounds and rows > 1)


@runs("kind", on=TRITON, interpreter=[FP8, INT4], cuda=[FP8, INT8, INT4])
@pytest.mark.parametrize("rows", [1, 3])
def test_operations_of_few_rows_by_codes_equal_the_direct_computation(implementation, rows, kind):
    """Between them one by a plain weight."""
    device, dtype = implementation.device, implementation.half
    shape = Shape(rows, 48, 96) if device == "cpu" else Shape(rows, 2048, 4096)
    matrix = coded(WeightLayout(kind, 32), shape, dtype, device)
    layer = CODED_PRODUCTS[kind].of(matrix)
    plain = TorchLinear(matrix.multiplied_out().tensors[0].double(), matrix.bias)  # in float64 no device packs it
    plain.weight = plain.weight.to(dtype)
    x, norm = random((rows, shape.depth), dtype, device, 1, 2.0), random((shape.depth,), F32, device, 4, 0.3) + 1
    before = random((rows, shape.columns), dtype, device, 5)
    for linear in (layer, plain):
        assert linear is not None
        rounded = linear is layer and layer.rounds and rows > 1
        product, want = LayerProduct(linear), result(matrix, x, norm)
        ops = CodedOps(x, LayerRows(*[torch.empty(0)] * 4), EPS)
        near(ops.product(ops.norm(norm), product), want, rounded)
        near(ops.gated(ops.norm(norm), product), gated_by(want), rounded)
        ops = CodedOps(before.clone(), LayerRows(*[torch.empty(0)] * 4), EPS)
        assert ops.add(x, product, norm) is norm
        near(ops.x, before.double() + result(matrix, x), rounded)


@runs("layout", on=TRITON, every=[WeightLayout(FP8), WeightLayout(INT4, 32)])
def test_a_row_by_codes_has_the_same_bits_when_other_rows_change(implementation, layout):
    device, dtype = implementation.device, implementation.half
    shape = Shape(5, 32, 96) if device == "cpu" else Shape(5, 4096, 4096)
    layer = CODED_PRODUCTS[layout.kind].of(coded(layout, shape, dtype, device))
    assert layer is not None
    for rows in (5,) if device == "cpu" else (5, 40, 70, 600):
        x = random((rows, shape.depth), dtype, device, 1)
        other = torch.cat((x[:1], random((rows - 1, shape.depth), dtype, device, 7, 9.0)))
        assert torch.equal(layer(x)[0], layer(other)[0])


@runs("norm", [False, True], on=TRITON)
def test_a_row_is_rounded_to_the_nearest_codes_of_its_own_scale(implementation, norm):
    x = random((3, 40), implementation.half, implementation.device, 1, 5.0)
    x[1] = 0.0
    weight = random((40,), F32, x.device.type, 2, 0.3) + 1 if norm else None
    codes, factor = fp8_rows(x, weight, EPS)
    want = x.double() if weight is None else normed(x, weight)
    assert factor.shape == (3, 1) and codes.dtype == torch.float8_e4m3fn
    largest = want.abs().amax(1, keepdim=True)
    torch.testing.assert_close(factor.double(), torch.where(largest > 0, largest / 448, 1.0), rtol=1e-5, atol=0)
    error = (codes.double() * factor.double() - want).abs()
    if implementation.name == "cuda":  # the interpreter loses a carry of its rounding
        assert bool((error <= 1.001 * (want.abs() * 2**-4 + factor.double() * 2**-10)).all())
    else:
        assert bool((codes.double().sign() == want.sign()).float().mean() > 0.9)


def test_products_by_codes_refuse_weights_that_no_kernel_serves() -> None:
    """Rows of whole 16 bytes, and groups of whole blocks of 32; of INT8 of 16."""

    def served(layout: WeightLayout, depth: int) -> bool:
        matrix = Matrix.empty(layout, 8, depth, BF16, torch.device("cpu"))
        return CODED_PRODUCTS[layout.kind].of(matrix) is not None

    assert served(WeightLayout(INT8), 48) and served(WeightLayout(INT4, 32), 96) and served(WeightLayout(FP8, 32), 96)
    assert not served(WeightLayout(INT8), 40) and not served(WeightLayout(FP8, 48), 96)


def test_a_model_of_codes_and_plain_weights_has_a_way_of_few_rows() -> None:
    def served(*products: Any) -> int:
        return quantised_linear.most_rows([LayerProduct(product) for product in products])

    def plain(columns: int, depth: int) -> TorchLinear:
        return TorchLinear(torch.empty(columns, depth, dtype=BF16, device="meta"))

    layer = CODED_PRODUCTS[INT8].of(Matrix.empty(WeightLayout(INT8), 8, 48, BF16, torch.device("cpu")))
    assert isinstance(layer, CodedLinear) and DENSE.kind not in CODED_PRODUCTS
    assert [served(layer), served(layer, plain(8, 48)), served(layer, plain(24576, 4096))] == [32, 32, 1]
    assert served(plain(8, 48)) == served(layer, lambda x, out=None: x) == 0
