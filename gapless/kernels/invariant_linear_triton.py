"""A matrix product in Triton whose rows do not depend on their batch, to the bit.

The order of its sums fixes a result's bits. The depth K is cut into segments, which follow from the weight's shape
alone. Within a segment a tensor core adds ascending parts of K by one instruction shape, from zero; segments are added
in ascending order in float32. The number of rows only decides who computes a segment: with few rows each segment has
its own program and the last to end adds them up, with many one program walks them all. Rows past the last are zeros.
The reference is `Linear`, within rounding.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels import linear as plain
from gapless.kernels.few_rows_triton import MOST_SPLIT_BLOCKS
from gapless.kernels.library_triton import all_stored, arch, counters, operator
from gapless.kernels.tiles import InvariantProduct, ProductTiles, choose_tiles

FEW_BLOCKS = 64
"""Blocks of results below which each segment has its own program: this bounds the memory of the parts."""
ROW_BLOCKS = tl.constexpr(8)
"""Blocks of rows that share their weights in the L2 cache."""


@triton.jit(do_not_specialize=["rows", "each"])
def product_kernel(
    x, weight, bias, out, parts, arrived, rows, each, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of results, share): `each` segments of K, one of them or all.

    parts [SEGMENTS, rows, N] float32; arrived int32 of zeros, one for each block, left as zeros.
    """
    # Neighbours share weights: the blocks of a group of rows run column by column.
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    first = block // (ROW_BLOCKS * COLUMNS) * ROW_BLOCKS
    high = tl.minimum(tl.cdiv(rows, BLOCK_M) - first, ROW_BLOCKS)
    within = block % (ROW_BLOCKS * COLUMNS)
    token = ((first + within % high) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = within // high * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real, inside = token < rows, column < N
    values = x + token[:, None] * K + k[None, :]
    lines = weight + column.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = tl.program_id(1) * each
    for segment in range(begin, begin + each):
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in range(segment * SEGMENT, tl.minimum((segment + 1) * SEGMENT, K), BLOCK_K):
            if K % BLOCK_K == 0:
                value = tl.load(values + at, mask=real[:, None], other=0.0)
                tile = tl.load(lines + at, mask=inside[None, :], other=0.0)
            else:
                there = at + k < K
                value = tl.load(values + at, mask=real[:, None] & there[None, :], other=0.0)
                tile = tl.load(lines + at, mask=inside[None, :] & there[:, None], other=0.0)
            sums = tl.dot(value, tile, sums, input_precision="ieee")
        total += sums
    mine = real[:, None] & inside[None, :]
    place = token[:, None] * N + column[None, :]
    done = each == SEGMENTS
    if not done:
        step = rows.to(tl.int64) * N
        tl.store(parts + tl.program_id(1) * step + place, total, mask=mine)
        all_stored()
        done = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SEGMENTS - 1
        if done:
            tl.store(arrived + block, 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in range(SEGMENTS):
                # Past the first-level cache: other programs wrote these.
                total += tl.load(parts + part * step + place, mask=mine, other=0.0, cache_modifier=".cg")
    if done:
        if BIAS:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mine)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, *, tiles: ProductTiles | None = None
) -> Tensor:
    """Return x [M, K] @ weight [N, K].T + bias [N]: [M, N]; all contiguous. A row's bits follow from the row alone.

    tiles: for tests and measuring; other `depth`, `segment` or `columns` may change bits.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    tiles = tiles or choose_tiles(InvariantProduct(rows, columns, depth, x.element_size()), arch(x.device))
    out = x.new_empty(rows, columns) if out is None else out
    segments = triton.cdiv(depth, tiles.segment)
    blocks = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
    split = segments > 1 and blocks < FEW_BLOCKS
    # They are empty if one program has all segments: a tensor of another dtype would be another kernel.
    parts = torch.empty((segments if split else 0, rows, columns), dtype=torch.float32, device=x.device)
    arrived = counters(x.device, MOST_SPLIT_BLOCKS)
    if rows:
        product_kernel[blocks, segments if split else 1](
            x, weight, x if bias is None else bias, out, parts, arrived, rows, 1 if split else segments,
            columns, depth, bias is not None, tiles.segment, segments, tiles.rows, tiles.columns, tiles.depth,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return out


def _invariant_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    product(x, weight, bias, out)


triton_invariant_product = operator(_invariant_product, "out")


class InvariantLinear(plain.TorchLinear):
    """A linear layer on CUDA by `product`."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty(x.shape[0], self.weight.shape[0]) if out is None else out
        triton_invariant_product(x.contiguous(), self.weight, self.bias, out)
        return out
