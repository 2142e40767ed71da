"""Products of few rows in Triton against float64, and against the same product made in separate steps.

Run on the CPU in Triton's interpreter (tests/kernels/interpreted) and on a GPU (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import fused_reference
import torch
from fused_cases import normed, random
from torch import Tensor

from gapless.kernels import few_rows, few_rows_triton
from gapless.kernels.few_rows_triton import FewRowsTiles
from gapless.kernels.linear import TorchLinear

EPS = 1e-5
ROUNDING = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}
"""Of values about one: those of 16 bits are also rounded between the norm's weight and the product."""


class Product(NamedTuple):
    rows: int
    columns: int
    depth: int
    tiles: FewRowsTiles | None = None
    """None: those that the engine takes"""


def operands(device: str, dtype: torch.dtype, product: Product, biased: bool) -> tuple[Tensor, TorchLinear, Tensor]:
    """Input, layer, and norm; a result is about one in size."""
    rows, columns, depth, _ = product
    x = random((rows, depth), dtype, device, 1, 2.0)
    weight = random((columns, depth), dtype, device, 2, depth**-0.5)
    bias = random((columns,), dtype, device, 3) if biased else None
    layer = TorchLinear(weight.double(), bias)  # in float64 no device packs it
    layer.weight = weight
    return x, layer, random((depth,), dtype, device, 4, 0.3) + 1


def expected(x: Tensor, layer: TorchLinear, norm: Tensor | None) -> Tensor:
    """In float64."""
    x = x.double() if norm is None else normed(x, norm, EPS)
    product = x @ layer.weight.double().T
    return product if layer.bias is None else product + layer.bias.double()


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def check_normed(device: str, dtype: torch.dtype, product: Product, biased: bool, gated: bool, early: bool) -> None:
    x, layer, norm = operands(device, dtype, product, biased)
    if product.rows > 1:
        x[0] = 0.0  # what an inert row may hold
    out = x.new_full((product.rows, product.columns // (2 if gated else 1)), float("nan"))
    few_rows_triton.launch(
        x, layer.weight, layer.bias, out, norm=norm, eps=EPS, gated=gated, tiles=product.tiles, early=early
    )
    want = expected(x, layer, norm)
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = gate * gate.sigmoid() * up
    close(out, want)


def check_added(device: str, dtype: torch.dtype, product: Product, biased: bool, early: bool) -> None:
    """Twice in a row: what the first leaves behind does not disturb the second, and both give the same."""
    y, layer, _ = operands(device, dtype, product, biased)
    before = random((product.rows, product.columns), dtype, device, 5)
    want = before.double() + expected(y, layer, None)
    found = []
    for _ in range(2):
        x = before.clone()
        few_rows_triton.launch(y, layer.weight, layer.bias, x, add=True, tiles=product.tiles, early=early)
        close(x, want)
        found.append(x)
    assert torch.equal(*found)


def check_operators(device: str, dtype: torch.dtype, product: Product) -> None:
    """Every operator with the tiles of the engine, beside torch's steps."""
    x, layer, norm = operands(device, dtype, product, True)
    ours, reference = few_rows.FEW_ROWS, fused_reference.FEW_ROWS
    rows = ours.first(x, norm, EPS)
    close(ours.linear(rows, EPS, layer), reference.linear(rows, EPS, layer).double())
    close(ours.silu_mul(rows, EPS, layer), reference.silu_mul(rows, EPS, layer).double())
    if product.rows == 1:
        out = x.new_empty(1, len(layer.weight))
        few_rows.triton_one_row_linear(x, layer.weight, layer.bias, out)
        close(out, expected(x, layer, None))
    a, b = (random((product.rows, product.columns), dtype, device, 5) for _ in range(2))
    after = random((product.columns,), dtype, device, 6)
    found, want = ours.linear_add(a, x, layer, after), reference.linear_add(b, x, layer, after)
    assert found.rows is a and found.norm is want.norm is after
    close(a, b.double())


def check_alone(device: str, dtype: torch.dtype, product: Product) -> None:
    """A row's result is that of the batch padded to the next power of two."""
    x, layer, norm = operands(device, dtype, product, False)
    whole = few_rows.triton_normed_linear(x, norm, EPS, layer.weight, None, False)
    for rows in {product.rows // 2 + 1, product.rows - 1}:
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
