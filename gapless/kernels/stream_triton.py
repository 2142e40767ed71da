"""Linear layers of few rows and large weights in Triton, with the operations after them: SiLU times gate, residual.

Stream K: the weight is cut into units of BLOCK_N outputs by BLOCK_K inputs, and each of a fixed number of programs has
an equal range of them, so that all multiprocessors read until the end. A block of outputs whose units belong to several
programs is summed by the last of them to end, in the order of programs. So the bits of a row follow from the weight's
shape, the GPU and the block of rows, and repeat.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.arch import Arch
from gapless.kernels.few_rows_triton import MOST_SPLIT_BLOCKS, weight_rows
from gapless.kernels.library_triton import all_stored, arch, counters, launch_options
from gapless.kernels.tiles import StreamProduct, StreamTiles, choose_tiles


@triton.jit
def _tile(weight, row, inside, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The weight's rows `row` at depths `k`: [BLOCK_N, BLOCK_K]."""
    place = weight + row.to(tl.int64)[:, None] * K + k[None, :]
    if N % BLOCK_N == 0 and K % (2 * BLOCK_K) == 0:  # units of two tiles may end beyond the depth
        return tl.load(place, eviction_policy="evict_first")
    mask = inside[:, None] & (k < K)[None, :]
    return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _ask(
    weight, begin, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr,
    GATED: tl.constexpr, ASKED: tl.constexpr,
):  # fmt: skip
    """Ask the cache for `ASKED` parts of the weight, from the unit `begin` on."""
    DEEP: tl.constexpr = (K + HELD * BLOCK_K - 1) // (HELD * BLOCK_K) * HELD
    SIZE: tl.constexpr = BLOCK_K * weight.dtype.element_ty.primitive_bitwidth // 8
    asm: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    for ahead in tl.static_range(ASKED):
        unit = tl.minimum(begin * HELD + ahead, (N + BLOCK_N - 1) // BLOCK_N * DEEP - 1)
        row, _ = weight_rows(unit // DEEP, N, BLOCK_N, GATED)
        place = weight + tl.minimum(row, N - 1).to(tl.int64) * K + tl.minimum(unit % DEEP * BLOCK_K, K - BLOCK_K)
        tl.inline_asm_elementwise(asm, "=r,l,r", [place.to(tl.int64), SIZE], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _finish(
    sums, bias, out, block, M, N: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write sums [BLOCK_N, BLOCK_M] of a block to `out` [M, N], or [M, N // 2] if GATED."""
    row, inside = weight_rows(block, N, BLOCK_N, GATED)
    if BIAS:
        sums += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    STRIDE: tl.constexpr = N // 2 if GATED else N
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, WIDTH, BLOCK_M)), (1, 2, 0)))
        sums = gate * tl.sigmoid(gate) * up
    sums = tl.trans(sums)
    token = tl.arange(0, BLOCK_M)[:, None]
    column = block * WIDTH + tl.arange(0, WIDTH)[None, :]
    mine = (token < M) & (column < STRIDE)
    tl.store(out + token * STRIDE + column, sums.to(out.dtype.element_ty), mask=mine)


@triton.jit
def givers(block, DEEP: tl.constexpr, UNITS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Return the first and the last program with a part of `block`."""
    return ((block * DEEP + 1) * PROGRAMS - 1) // UNITS, ((block + 1) * DEEP * PROGRAMS - 1) // UNITS


@triton.jit
def _leave(
    sums, parts, block, program, N: tl.constexpr, DEEP: tl.constexpr, UNITS: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a program's sums of a block to parts float32 [programs of a block, BLOCK_M, N]."""
    low, _ = givers(block, DEEP, UNITS, PROGRAMS)
    row, inside = weight_rows(block, N, BLOCK_N, False)
    line = (program - low) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(parts + line[:, None] * N + row[None, :], tl.trans(sums), mask=inside[None, :])


@triton.jit
def _inputs(x, token, at, M, K: tl.constexpr):
    """The rows `token` [BLOCK_M] at depths `at`: [depths, BLOCK_M]."""
    place = x + token[None, :] * K + at[:, None]
    return tl.load(place, mask=(at < K)[:, None] & (token < M)[None, :], other=0.0)


@triton.jit(do_not_specialize=["M"])
def stream_kernel(
    x, weight, bias, out, parts, arrived, M, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HELD: tl.constexpr, PROGRAMS: tl.constexpr, ASKED: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows. The weight is the first operand of the tensor cores, which take at least 64 rows of it.

    A program has a range of units, each BLOCK_N outputs by HELD * BLOCK_K inputs. It loads its last unit before the
    previous kernel ends, and multiplies it last. parts float32 [PROGRAMS, 2, BLOCK_N, BLOCK_M]: a program's sums of the
    first and the last of its blocks, if others have a part in them; arrived int32 of zeros, one for each block, left as
    zeros. ASKED: parts of BLOCK_K inputs asked of the cache before the previous kernel ends.
    """
    DEEP: tl.constexpr = (K + HELD * BLOCK_K - 1) // (HELD * BLOCK_K)
    UNITS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * DEEP
    GIVERS: tl.constexpr = 2 + max(0, DEEP - 2) // (UNITS // PROGRAMS)
    """Most programs that share a block"""
    program = tl.program_id(0)
    begin, end = program * UNITS // PROGRAMS, (program + 1) * UNITS // PROGRAMS
    token, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    first, final = begin // DEEP, (end - 1) // DEEP
    held_at = (end - 1) % DEEP * (HELD * BLOCK_K) + tl.arange(0, HELD * BLOCK_K)
    held_row, held_inside = weight_rows(final, N, BLOCK_N, GATED)
    held = _tile(weight, held_row, held_inside, held_at, N, K, BLOCK_N, HELD * BLOCK_K)
    if EARLY:
        cuda.gdc_launch_dependents()
        _ask(weight, begin, N, K, BLOCK_N, BLOCK_K, HELD, GATED, ASKED)
        cuda.gdc_wait()
    held_value = _inputs(x, token, held_at, M, K)
    mine = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for part in range(begin * HELD, (end - 1) * HELD):
        block, step = part // (DEEP * HELD), part % (DEEP * HELD)
        row, inside = weight_rows(block, N, BLOCK_N, GATED)
        at = step * BLOCK_K + k
        tile = _tile(weight, row, inside, at, N, K, BLOCK_N, BLOCK_K)
        sums = tl.dot(tile, _inputs(x, token, at, M, K), sums, input_precision="ieee")
        if step == DEEP * HELD - 1:
            if LEFT:
                _leave(sums, parts, block, program, N, DEEP, UNITS, PROGRAMS, BLOCK_M, BLOCK_N)
            elif block * DEEP >= begin:
                _finish(sums, bias, out, block, M, N, BIAS, GATED, BLOCK_M, BLOCK_N)
            else:
                tl.store(parts + 2 * program * (BLOCK_N * BLOCK_M) + mine, sums)
            sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    sums = tl.dot(held, held_value, sums, input_precision="ieee")
    if LEFT:
        _leave(sums, parts, final, program, N, DEEP, UNITS, PROGRAMS, BLOCK_M, BLOCK_N)
    elif (final * DEEP >= begin) & (end % DEEP == 0):
        _finish(sums, bias, out, final, M, N, BIAS, GATED, BLOCK_M, BLOCK_N)
    else:
        tl.store(parts + (2 * program + (final != first).to(tl.int32)) * (BLOCK_N * BLOCK_M) + mine, sums)
    if not LEFT:
        all_stored()
    for last in tl.static_range(0 if LEFT else 2):
        block = final if last else first
        other = (final != first) if last else True
        if other & ((block * DEEP < begin) | ((block + 1) * DEEP > end)):
            low, high = givers(block, DEEP, UNITS, PROGRAMS)
            if tl.atomic_add(arrived + block, 1, sem="acq_rel") == high - low:
                tl.store(arrived + block, 0)
                sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for giver in tl.static_range(GIVERS):
                    slot = 2 * (low + giver) + (block != (low + giver) * UNITS // PROGRAMS // DEEP).to(tl.int32)
                    real = mine < (high - low - giver + 1) * (BLOCK_N * BLOCK_M)
                    # Past the first-level cache: other programs wrote these.
                    place = parts + slot * (BLOCK_N * BLOCK_M) + mine
                    sums += tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
                _finish(sums, bias, out, block, M, N, BIAS, GATED, BLOCK_M, BLOCK_N)


@triton.jit
def summed_norm_kernel(
    x, parts, bias, weight, out, eps, WIDTH: tl.constexpr, DEEP: tl.constexpr, UNITS: tl.constexpr,
    PROGRAMS: tl.constexpr, GIVERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add what a product left in `parts` to x [M, WIDTH], and write the norm of the sum to `out`. Program (row)."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    low, high = givers(column // BLOCK_N, DEEP, UNITS, PROGRAMS)
    row = tl.program_id(0)
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    place = x + row * WIDTH + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for giver in tl.static_range(GIVERS):
        there = inside & (giver <= high - low)
        sums += tl.load(parts + (giver * BLOCK_M + row) * WIDTH + column, mask=there, other=0.0)
    if BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    # The norm uses the sum rounded to x's dtype, as the next layer reads it.
    kept = (value + sums).to(x.dtype.element_ty)
    tl.store(place, kept, mask=inside)
    value = kept.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    tl.store(out + row * WIDTH + column, (value * scale).to(out.dtype.element_ty), mask=inside)


class Plan(NamedTuple):
    """The shares of programs in a product."""

    tiles: StreamTiles
    blocks: int
    """Blocks of outputs"""
    deep: int
    """Units of a block"""
    programs: int

    @classmethod
    def of(cls, rows: int, columns: int, depth: int, gpu: Arch, tiles: StreamTiles | None) -> Plan:
        tiles = tiles or choose_tiles(StreamProduct(rows, columns, depth), gpu)
        blocks, deep = triton.cdiv(columns, tiles.columns), triton.cdiv(depth, tiles.held * tiles.depth)
        assert rows <= tiles.rows and blocks <= MOST_SPLIT_BLOCKS
        return cls(tiles, blocks, deep, min(gpu.processors, blocks * deep))

    @property
    def units(self) -> int:
        return self.blocks * self.deep

    @property
    def givers(self) -> int:
        """Most programs that share a block"""
        return 2 + max(0, self.deep - 2) // (self.units // self.programs)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, *, gated: bool = False,
    tiles: StreamTiles | None = None, early: bool | None = None,
) -> Tensor:  # fmt: skip
    """Write x @ weight.T + bias to `out`. x [M, K], weight [N, K], all contiguous.

    gated: the first half of the columns are gates, and out [M, N // 2] is silu(gate) * up. Without `out`, sums are left
    to `add_norm`. Returns the parts. tiles and early (see `launch_options`) are for measuring.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and (out is None or out.is_contiguous())
    gpu = arch(x.device)
    plan = Plan.of(rows, columns, depth, gpu, tiles)
    tiles, left = plan.tiles, out is None
    early = gpu.early if early is None else early
    whole = depth >= tiles.depth and not depth % 8  # the cache is asked for aligned lines
    shape = (plan.givers, tiles.rows, columns) if left else (plan.programs, 2, tiles.columns, tiles.rows)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    stream_kernel[(plan.programs,)](
        x, weight, x if bias is None else bias, x if out is None else out, parts,
        counters(x.device, MOST_SPLIT_BLOCKS), rows, N=columns, K=depth, BIAS=bias is not None, GATED=gated,
        EARLY=early, BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_K=tiles.depth, HELD=tiles.held,
        PROGRAMS=plan.programs, ASKED=tiles.asked if whole else 0, LEFT=left, num_warps=tiles.warps,
        num_stages=tiles.stages, **launch_options(early),
    )  # fmt: skip
    return parts


def add_norm(
    x: Tensor, parts: Tensor, depth: int, bias: Tensor | None, weight: Tensor, eps: float, *,
    tiles: StreamTiles | None = None, early: bool | None = None,
) -> Tensor:  # fmt: skip
    """Add a product of inputs [M, depth], left by `launch` in `parts`, to x [M, N] in place; return the norm of the
    sum, with `weight` [N]."""
    rows, width = x.shape
    gpu = arch(x.device)
    plan = Plan.of(rows, width, depth, gpu, tiles)
    early = gpu.early if early is None else early
    out, block = torch.empty_like(x), triton.next_power_of_2(width)
    summed_norm_kernel[(rows,)](
        x, parts, x if bias is None else bias, weight, out, eps, width, plan.deep, plan.units, plan.programs,
        plan.givers, plan.tiles.rows, plan.tiles.columns, bias is not None, early, block,
        num_warps=min(16, max(1, block // 256)), **launch_options(early),
    )  # fmt: skip
    return out
