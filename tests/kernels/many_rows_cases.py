"""Products of many rows in Triton against float64.

Run on the CPU in Triton's interpreter (tests/kernels/interpreted) and on a GPU (tests/gpu).
"""

from __future__ import annotations

from typing import NamedTuple

import fused_reference
import torch
from few_rows_cases import Product as FewProduct
from few_rows_cases import close, expected, operands, random
from paged import LAYER, Heads, paged, unturned
from torch import Tensor

from gapless.kernels import many_rows_triton
from gapless.kernels.linear import TorchLinear
from gapless.kernels.many_rows_triton import Following, ManyRowsTiles
from gapless.kernels.seam import FusedRows
from gapless.kernels.views import Rotation

EPS = 1e-5


class Product(NamedTuple):
    rows: int
    columns: int
    depth: int
    tiles: ManyRowsTiles
    biased: bool = False

    def operands(self, device: str, dtype: torch.dtype) -> tuple[Tensor, TorchLinear, Tensor]:
        return operands(device, dtype, FewProduct(*self[:3]), self.biased)


def check_divided(device: str, dtype: torch.dtype, product: Product, gated: bool, early: bool) -> None:
    """A norm that the product finishes."""
    x, layer, norm = product.operands(device, dtype)
    x[0] = 0.0  # what an inert row may hold
    squares = x.float().square().view(len(x), 4, -1).sum(-1)
    out = x.new_full((product.rows, product.columns // (2 if gated else 1)), float("nan"))
    many_rows_triton.launch(
        x * norm, layer.weight, layer.bias, out, product.tiles, squares=squares, eps=EPS, gated=gated, early=early
    )
    want = expected(x, layer, norm)
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = gate * gate.sigmoid() * up
    close(out, want)


def check_added(device: str, dtype: torch.dtype, product: Product, early: bool) -> None:
    """Twice in a row: what the first leaves behind does not disturb the second, and both give the same."""
    y, layer, _ = product.operands(device, dtype)
    before = random((product.rows, product.columns), dtype, device, 5)
    norm = random((product.columns,), dtype, device, 6)
    found = []
    for _ in range(2):
        x = before.clone()
        squares = torch.full((len(x), -(-product.columns // product.tiles.columns)), float("nan"), device=device)
        following = Following(norm, torch.full_like(x, float("nan")), squares)
        many_rows_triton.launch(y, layer.weight, layer.bias, x, product.tiles, following=following, early=early)
        close(x, before.double() + expected(y, layer, None))
        assert torch.equal(following.scaled, x * norm)
        torch.testing.assert_close(squares.sum(1), x.float().square().sum(1))
        found += [x, squares]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def check_operators(ours: FusedRows, device: str, dtype: torch.dtype, rows: int, width: int, inner: int) -> None:
    """Down, the next layer's gate_up, and the first product of all, with the tiles of the engine."""
    y, down, _ = operands(device, dtype, FewProduct(rows, width, inner), True)
    _, gate_up, norm = operands(device, dtype, FewProduct(rows, 2 * inner, width), True)
    x = random((rows, width), dtype, device, 5)
    want = x.double() + expected(y, down, None)
    found = ours.linear_add(x, y, down, norm)
    close(x, want)
    want = expected(x, gate_up, norm)
    close(ours.linear(found, EPS, gate_up), want)
    gate, up = want.chunk(2, dim=-1)
    close(ours.silu_mul(found, EPS, gate_up), gate * gate.sigmoid() * up)
    close(ours.linear(ours.first(x, norm, EPS), EPS, gate_up), want)


def check_alone(device: str, dtype: torch.dtype, product: Product) -> None:
    """A row's result does not depend on its neighbours, nor on how many they are where the tiles are the same."""
    y, layer, _ = product.operands(device, dtype)
    x = random((product.rows, product.columns), dtype, device, 5)
    found = []
    for rows, others in ((product.rows, 1.0), (product.rows, 3.0), (product.rows - 1, 1.0)):
        out, changed = x[:rows].clone(), y[:rows] * others
        changed[:3] = y[:3]
        squares = torch.empty((rows, -(-product.columns // product.tiles.columns)), device=device)
        following = Following(x[0], torch.empty_like(out), squares)
        many_rows_triton.launch(changed, layer.weight, layer.bias, out, product.tiles, following=following)
        found.append(torch.cat((out[:3].float(), squares[:3]), dim=1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def check_decode(
    ours: FusedRows, device: str, dtype: torch.dtype, heads: Heads, lengths: list[int], norm: bool
) -> None:
    """Rotated, written and read, beside the same in float32 and plain torch; nothing else of the cache is written."""
    batch, scale = paged(heads, lengths, dtype=dtype, device=device), heads.dim**-0.5
    turn = unturned(heads, batch, norm)
    wide = batch._replace(cache=batch.cache.to(torch.float32, copy=True))
    rotation = Rotation(*(part.float() if isinstance(part, Tensor) else part for part in turn.rotation))
    qkv = turn.qkv.to(torch.float32, copy=True)
    want = fused_reference.MANY_ROWS.decode(qkv, rotation, wide.kv, turn.tokens, wide.batch, scale)
    before = batch.cache.clone()
    found = ours.decode(turn.qkv, turn.rotation, batch.kv, turn.tokens, batch.batch, scale)
    # Values of several times one are rounded when they are rotated, written and summed.
    close(found, want.double())
    torch.testing.assert_close(batch.cache.float(), wide.cache, rtol=2e-2, atol=2e-2, equal_nan=True)
    page, entry = turn.tokens.slots // batch.cache.shape[3], turn.tokens.slots % batch.cache.shape[3]
    for cache in (before, batch.cache):
        cache[page, LAYER, :, entry] = 0
    torch.testing.assert_close(batch.cache, before, rtol=0, atol=0, equal_nan=True)
