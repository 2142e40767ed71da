"""Linear layers of 33 to 256 rows in Triton, with the operations between them: norm, SiLU times gate, residual.

A norm is folded into the products on both sides of it. The one before it, which adds to the residual, leaves the rows
times the norm's weight and the sums of their squares; the one after it divides its own sums by the root mean square. So
nothing is launched between two products. The tiles of a product are few and all run at once.

On Hopper a kernel begins before the previous one ends (programmatic dependent launch), and meanwhile loads its weight
into the cache.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.tools.tensor_descriptor import TensorDescriptor

from gapless.kernels.adapt_fused_triton import AdapterWork, shrink
from gapless.kernels.library_triton import arch, launch_options

MOST_MANY_ROWS = 256
"""Most rows of these kernels."""
MOST_NARROW = 4096
"""Narrow tiles of a product run all at once for up to this many columns"""
LINE = tl.constexpr(64)
"""Elements of 16 bits in a line of the cache."""


@triton.jit
def _finish(
    sums, up, scale, bias, out, norm, scaled, squares, M, N: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ADD: tl.constexpr, LEAVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a program's sums [BLOCK_M, BLOCK_N] to `out`, or add them; optionally leave a norm's inputs."""
    WIDTH: tl.constexpr = N // 2 if GATED else N
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < WIDTH
    sums *= scale[:, None]
    if BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up *= scale[:, None]
        if BIAS:
            up += tl.load(bias + WIDTH + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        sums *= tl.sigmoid(sums) * up
    mine = (token < M)[:, None] & inside[None, :]
    at = token[:, None] * WIDTH + column[None, :]
    if ADD:
        sums += tl.load(out + at, mask=mine, other=0.0).to(tl.float32)
    kept = sums.to(out.dtype.element_ty)
    tl.store(out + at, kept, mask=mine)
    if LEAVE:
        # The norm uses the sum rounded to its dtype, as the next layer reads it.
        value = tl.where(inside[None, :], kept.to(tl.float32), 0.0)
        tl.store(squares + token * tl.num_programs(1) + tl.program_id(1), tl.sum(value * value, axis=1), mask=token < M)
        value *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(scaled + at, value.to(scaled.dtype.element_ty), mask=mine)


@triton.jit
def _ask_for(weight, column, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Request rows `column` and on of the weight into the second-level cache."""
    row = (column + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None] * K
    line = tl.minimum(tl.arange(0, triton.next_power_of_2((K + LINE - 1) // LINE)) * LINE, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + row + line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, weight, matrix, before, bias, out, norm, scaled, squares, eps, given, down, inner, slots, M, N: tl.constexpr,
    K: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    LEAVE: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr, SHARES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns). x and weight are descriptors of the pointers `given` and `matrix`.

    before [M, BEFORE] float32: sums of squares of x before its norm's weight, if BEFORE. GATED: BLOCK_N gates and their
    ups. scaled, squares: inputs of the next norm, if LEAVE. EARLY: the weight is requested while the previous kernel
    runs. If LINES, further programs do the first half of adapters, see `adapt_fused_triton.shrink`.
    """
    COLUMNS: tl.constexpr = ((N // 2 if GATED else N) + BLOCK_N - 1) // BLOCK_N
    if LINES > 0 and tl.program_id(1) >= COLUMNS:
        program = (tl.program_id(1) - COLUMNS) * tl.num_programs(0) + tl.program_id(0)
        shrink(given, down, inner, slots, program, M, K, LINES, SHARES, EARLY)
    else:
        WIDTH: tl.constexpr = N // 2 if GATED else N
        row = tl.program_id(0) * BLOCK_M
        column = tl.program_id(1) * BLOCK_N
        token = row + tl.arange(0, BLOCK_M)
        if EARLY:
            cuda.gdc_launch_dependents()
            if row == 0 and column + BLOCK_N <= WIDTH:
                _ask_for(matrix, column, K, BLOCK_N)
                if GATED:
                    _ask_for(matrix, WIDTH + column, K, BLOCK_N)
            cuda.gdc_wait()
        scale = tl.full([BLOCK_M], 1.0, tl.float32)
        if BEFORE:
            part = tl.arange(0, triton.next_power_of_2(BEFORE))
            there = (token < M)[:, None] & (part < BEFORE)[None, :]
            found = tl.load(before + token[:, None] * BEFORE + part[None, :], mask=there, other=0.0)
            scale = tl.rsqrt(tl.sum(found, axis=1) / K + eps)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in range(0, K, BLOCK_K):
            value = x.load([row, at])
            sums = tl.dot(value, weight.load([column, at]).T, sums, input_precision="ieee")
            if GATED:
                up = tl.dot(value, weight.load([WIDTH + column, at]).T, up, input_precision="ieee")
        _finish(sums, up, scale, bias, out, norm, scaled, squares, M, N, BIAS, GATED, ADD, LEAVE, BLOCK_M, BLOCK_N)


class ManyRowsTiles(NamedTuple):
    """Tiles of a product; a gated one has as many ups as it has `columns` of gates."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles_for(rows: int, columns: int, gated: bool = False) -> ManyRowsTiles:
    """Returns the tiles of a product from a table, measured for Qwen3-0.6B: nothing is measured at run time."""
    wide = columns > MOST_NARROW and not gated
    if rows <= 64 or (rows <= 128 and not wide):
        return ManyRowsTiles(64, 32, 128, 4, 3 if gated else 4)
    if rows > 128 and (gated or wide):
        return ManyRowsTiles(128, 64, 64, 4, 4)
    return ManyRowsTiles(64, 64, 128, 4, 4 if columns <= 2048 else 3)


class Following(NamedTuple):
    """The norm after a residual, and its product's inputs."""

    norm: Tensor
    """[N] its weight"""
    scaled: Tensor
    """[M, N] gets the rows times the weight"""
    squares: Tensor
    """[M, blocks of columns] float32, gets the sums of the rows' squares"""


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tiles: ManyRowsTiles, *, squares: Tensor | None = None,
    eps: float = 0.0, gated: bool = False, following: Following | None = None, beside: AdapterWork | None = None,
    early: bool | None = None,
) -> None:  # fmt: skip
    """Write x @ weight.T + bias to `out`, or with `following` or `beside` add it. x [M, K], weight [N, K], all
    contiguous.

    squares [M, S] float32: sums of squares; the product's rows are divided by the root of their mean over K, as a norm
    does. gated: the first half of the columns are gates, and out [M, N // 2] is silu(gate) * up. beside: the first half
    of x's adapter terms. early: for measuring.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    early = arch(x.device).early if early is None else early
    grid = triton.cdiv(rows, tiles.rows), triton.cdiv(out.shape[1], tiles.columns)
    if beside is not None:
        grid = grid[0], grid[1] + triton.cdiv(beside.programs(), grid[0])
    norm, scaled, left = following or (out, out, out)
    down, inner, slots = (out, out, out) if beside is None else beside[:3]
    product_kernel[grid](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.depth]),
        weight, out if squares is None else squares, out if bias is None else bias, out, norm, scaled, left, eps, x,
        down, inner, slots, rows, columns, depth, 0 if squares is None else squares.shape[1], bias is not None, gated,
        following is not None or beside is not None, following is not None, early,
        0 if beside is None else down.shape[1], 0 if beside is None else beside.shares, tiles.rows, tiles.columns,
        tiles.depth, num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(early),
    )  # fmt: skip


MOST_MANY_WEIGHT = 8 << 20
"""Elements of a matrix beyond which its tiles no longer run all at once: torch's product is faster there."""
LEAST_DEPTH = 128
"""Inputs held by a tile at a time."""


def serves(weight: Tensor) -> bool:
    """Return whether the copy engine can read such a matrix [N, K], and its tiles run all at once."""
    depth, aligned = weight.shape[1], weight.data_ptr() % 16 == 0
    return (
        aligned
        and weight.numel() <= MOST_MANY_WEIGHT
        and depth >= LEAST_DEPTH
        and depth * weight.element_size() % 16 == 0
    )
