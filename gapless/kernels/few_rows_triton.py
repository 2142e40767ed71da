"""Linear layers of few rows in Triton, with the operations around them: norm, SiLU times gate, residual.

With few rows a product takes as long as its weight takes to arrive. So the weight is loaded first, by enough programs
to keep every multiprocessor busy, and the previous kernel's result is loaded last. If the launch allows it
(programmatic dependent launch, Hopper and later), a kernel begins before the previous one ends, and its weight arrives
meanwhile.

One row, or two and a small matrix, are multiplied in turn, and the norm is folded in: sum(w * x * norm) / rms(x), with
the mean square computed on the way. All other cases use tensor cores, which need their input as it is: there the norm
is a separate launch, during which the weight is loaded.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.adapt_fused_triton import NO_ADAPTERS, AdapterWork, expanded, first_lines, shrink
from gapless.kernels.library_triton import all_stored, arch, counters, launch_options, prefetch
from gapless.kernels.norm_triton import rms_norm
from gapless.kernels.tiles import FewRowsProduct, FewRowsTiles, choose_tiles

MOST_FEW_ROWS = 32
"""Most rows of these kernels."""
MOST_FEW_WEIGHT = 64 << 20
"""Several rows take less time here than in torch's product, with separate launches of norm and activation, for matrices
of up to this many elements: measured for Qwen3 of 1.7B, 4B and 8B."""
MOST_SPLIT_BLOCKS = 4096
"""Most blocks of columns of a product with split depth."""


@triton.jit
def weight_rows(block, N: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the weight's rows of a block [BLOCK_N], and whether each exists. GATED: gates first, then their ups."""
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        column = block * (BLOCK_N // 2) + lane % (BLOCK_N // 2)
        return column + lane // (BLOCK_N // 2) * (N // 2), column < N // 2
    row = block * BLOCK_N + lane
    return row, row < N


@triton.jit
def _store(
    sums, bias, out, M, N: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes a program's sums [BLOCK_M, BLOCK_N] to `out` [M, N], or [M, N // 2] if GATED, or adds them to it."""
    row, inside = weight_rows(tl.program_id(0), N, BLOCK_N, GATED)
    if BIAS:
        sums += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    STRIDE: tl.constexpr = N // 2 if GATED else N
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))
        sums = gate * tl.sigmoid(gate) * up
    token = tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    mine = (token < M) & (column < STRIDE)
    place = out + token * STRIDE + column
    if ADD:
        sums += tl.load(place, mask=mine, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _tile(lines, inside, k, K: tl.constexpr):
    """The weight of a program's rows at depths `k`, zero past the end: [BLOCK_N, BLOCK_K]."""
    return tl.load(lines + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _begin(
    weight, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Request the first part of a program's weight, then wait for the previous kernel. Returns the addresses of the
    weight's rows [BLOCK_N, 1], whether each exists, the depths of that part [BLOCK_K], and the part."""
    row, inside = weight_rows(tl.program_id(0), N, BLOCK_N, GATED)
    k = tl.arange(0, BLOCK_K)
    lines = weight + row.to(tl.int64)[:, None] * K
    tile = _tile(lines, inside, k, K)
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    return lines, inside, k, tile


@triton.jit
def _own_adapters(
    up, slots, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, RANK: tl.constexpr
):
    """Return the slots of a program's rows [BLOCK_M], whether any is above 0, and the first lines of their adapters."""
    row, inside = weight_rows(tl.program_id(0), N, BLOCK_N, GATED)
    token = tl.arange(0, BLOCK_M)
    slot = tl.load(slots + token, mask=token < M, other=0)
    # Looking takes longer than adding a few zeros.
    some = tl.max(slot, axis=0) if BLOCK_M > 4 else 1
    return slot, some, first_lines(up, slot, row, inside, N, RANK)


@triton.jit
def _added(
    own, up, inner, N: tl.constexpr, RANK: tl.constexpr, PROJECTIONS: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return the adapters' terms of a program's result; `own` is the result of `_own_adapters`."""
    row, inside = weight_rows(tl.program_id(0), N, BLOCK_N, GATED)
    slot, some, held = own
    low = tl.program_id(0) * BLOCK_N
    return expanded(
        held, some, up, inner, slot, row, inside, low, N, RANK, PROJECTIONS, FIRST, SECOND, BLOCK_M, BLOCK_N, GATED
    )


@triton.jit
def rows_in_turn_kernel(
    x, norm, weight, bias, out, table, inner, slots, eps, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADAPT: tl.constexpr, RANK: tl.constexpr, PROJECTIONS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """One row or two, not on the tensor cores. BLOCK_K is all of K, or the part loaded at a time."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if ADAPT and ADD and tl.program_id(0) >= BLOCKS:
        shrink(x, table, inner, slots, tl.program_id(0) - BLOCKS, ROWS, K, RANK, SHARES, EARLY)
    else:
        if ADAPT and not ADD:
            own = _own_adapters(table, slots, ROWS, N, ROWS, BLOCK_N, GATED, RANK)
        lines, inside, k, tile = _begin(weight, N, K, BLOCK_N, BLOCK_K, GATED, EARLY)
        if ROWS == 1:
            sums = _one_row(x, norm, lines, inside, k, tile, eps, K, NORM, BLOCK_N, BLOCK_K)
        else:
            sums = _two_rows(x, norm, lines, inside, k, tile, eps, K, NORM, BLOCK_N, BLOCK_K)
        if ADAPT and not ADD:
            sums += _added(own, table, inner, N, RANK, PROJECTIONS, FIRST, SECOND, ROWS, BLOCK_N, GATED)
        _store(sums, bias, out, ROWS, N, BIAS, GATED, ADD, ROWS, BLOCK_N)


@triton.jit
def _one_row(
    x, norm, lines, inside, k, tile, eps, K: tl.constexpr, NORM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a row times a program's part of the weight [1, BLOCK_N], which begins with `tile`: products in
    registers."""
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for begin in range(0, K, BLOCK_K):
        at = begin + k
        value = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * value[None, :]
        if K > BLOCK_K:
            tile = _tile(lines, inside, at + BLOCK_K, K)
    found = tl.sum(sums, axis=1)
    if NORM:
        found *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    return found[None, :]


@triton.jit
def _two_rows(
    x, norm, lines, inside, k, tile, eps, K: tl.constexpr, NORM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Do the same with two rows, one after the other: [2, BLOCK_N]. Each part of K is summed at once."""
    token = tl.arange(0, 2)
    sums = tl.zeros([2, BLOCK_N], tl.float32)
    squares = tl.zeros([2], tl.float32)
    for begin in range(0, K, BLOCK_K):
        at = begin + k
        wide = tile.to(tl.float32)
        if NORM:
            scale = tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        for m in tl.static_range(2):
            value = tl.load(x + m * K + at, mask=at < K, other=0.0).to(tl.float32)
            if NORM:
                squares += tl.where(token == m, tl.sum(value * value, axis=0), 0.0)
                value *= scale
            sums += tl.where(token[:, None] == m, tl.sum(wide * value[None, :], axis=1)[None, :], 0.0)
        if K > BLOCK_K:
            tile = _tile(lines, inside, at + BLOCK_K, K)
    if NORM:
        sums *= tl.rsqrt(squares / K + eps)[:, None]
    return sums


@triton.jit
def _ask(lines, first, K: tl.constexpr, PART: tl.constexpr):
    """Request `PART` of the weight's rows `lines` [BLOCK_N], from depth `first` on."""
    LINE: tl.constexpr = 1024 // lines.dtype.element_ty.primitive_bitwidth
    for begin in tl.static_range(0, PART, 16 * LINE):
        at = tl.minimum(first + begin + tl.arange(0, 16) * LINE, K - 1)
        prefetch(lines[:, None] + at[None, :])


@triton.jit
def _part(lines, inside, at, K: tl.constexpr):
    """The weight's rows `lines` [BLOCK_N, 1] at depths `at`, which no other program reads."""
    mask = inside[:, None] & (at < K)[None, :]
    return tl.load(lines + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _inputs(rows, token, at, M, K: tl.constexpr):
    """The inputs `rows` [1, BLOCK_M] at depths `at`."""
    return tl.load(rows + at[:, None], mask=(at < K)[:, None] & (token < M)[None, :], other=0.0)


@triton.jit(do_not_specialize=["M"])
def matrix_kernel(
    x, weight, bias, out, parts, arrived, table, inner, slots, M, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, ADAPT: tl.constexpr, RANK: tl.constexpr, PROJECTIONS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows on the tensor cores, which take at least 64 rows of their first operand: the weight's.

    Program (columns, split): the last to end of a split K sums the parts. parts [SPLITS, BLOCK_M, N] float32; arrived
    int32 of zeros, one for each block of columns, left as zeros. A program's part of the weight is loaded before the
    previous kernel ends if BLOCK_K is all of its depth, and otherwise prefetched.
    """
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    if ADAPT and ADD and tl.program_id(0) >= BLOCKS:
        program = (tl.program_id(0) - BLOCKS) * SPLITS + tl.program_id(1)
        shrink(x, table, inner, slots, program, M, K, RANK, SHARES, EARLY)
    else:
        row, inside = weight_rows(tl.program_id(0), N, BLOCK_N, GATED)
        split = tl.program_id(1)
        token = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
        lines = weight + row.to(tl.int64)[:, None] * K
        rows = x + token[None, :] * K
        at = split * PART + k
        if EARLY:
            cuda.gdc_launch_dependents()
        if PART == BLOCK_K:
            # It reaches shared memory before the input.
            tile = _part(lines, inside, at, K)
        elif EARLY:
            _ask(weight + tl.minimum(row, N - 1).to(tl.int64) * K, split * PART, K, PART)
        if ADAPT and not ADD:
            own = _own_adapters(table, slots, M, N, BLOCK_M, BLOCK_N, GATED, RANK)
        if EARLY:
            cuda.gdc_wait()
        if PART == BLOCK_K:
            value = _inputs(rows, token, at, M, K)
        if ADAPT and not ADD:
            # While the inputs arrive.
            added = _added(own, table, inner, N, RANK, PROJECTIONS, FIRST, SECOND, BLOCK_M, BLOCK_N, GATED)
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if PART == BLOCK_K:
            sums = tl.dot(tile, value, sums, input_precision="ieee")
        else:
            for begin in range(0, PART, BLOCK_K):
                tile = _part(lines, inside, at + begin, K)
                sums = tl.dot(tile, _inputs(rows, token, at + begin, M, K), sums, input_precision="ieee")
        sums = tl.trans(sums)
        if SPLITS == 1:
            if ADAPT and not ADD:
                sums += added
            _store(sums, bias, out, M, N, BIAS, GATED, ADD, BLOCK_M, BLOCK_N)
        else:
            place = parts + token[:, None] * N + row[None, :]
            tl.store(place + split * BLOCK_M * N, sums, mask=inside[None, :])
            all_stored()
            counter = arrived + tl.program_id(0)
            if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
                tl.store(counter, 0)
                sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for part in tl.static_range(SPLITS):
                    # Past the first-level cache: other programs wrote these.
                    sums += tl.load(place + part * BLOCK_M * N, mask=inside[None, :], other=0.0, cache_modifier=".cg")
                if ADAPT and not ADD:
                    sums += added
                _store(sums, bias, out, M, N, BIAS, GATED, ADD, BLOCK_M, BLOCK_N)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, norm: Tensor | None = None, eps: float = 0.0,
    gated: bool = False, add: bool = False, tiles: FewRowsTiles | None = None, early: bool | None = None,
    beside: AdapterWork | None = None,
) -> None:  # fmt: skip
    """Write x @ weight.T + bias to `out`, or add it. x [M, K], weight [N, K], all contiguous.

    norm [K]: x is normed first. gated: the first half of the columns are gates, and out [M, N // 2] is silu(gate) * up.
    tiles and early (see `launch_options`) are for measuring. beside: work for the rows' adapters.
    """
    (rows, depth), columns = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous() and 1 <= rows <= MOST_FEW_ROWS
    gpu, shape = arch(x.device), FewRowsProduct(rows, columns, depth, beside is not None and not add)
    tiles = tiles or choose_tiles(shape, gpu)
    early = gpu.early if early is None else early
    grid = triton.cdiv(columns, tiles.columns)
    programs = -(-beside.programs() // tiles.splits) if beside is not None and add else 0
    fixed = {
        "N": columns, "K": depth, "BIAS": bias is not None, "GATED": gated, "ADD": add, "EARLY": early,
        "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth, "num_warps": tiles.warps, **launch_options(early),
    }  # fmt: skip
    fixed |= NO_ADAPTERS if beside is None else beside.fixed()
    bias = x if bias is None else bias
    own = (x, out, x) if beside is None else beside[:3]
    if shape.in_turn:
        rows_in_turn_kernel[(grid + programs,)](
            x, x if norm is None else norm, weight, bias, out, *own, eps, rows, NORM=norm is not None, **fixed
        )
        return
    block = 16 if rows <= 16 else 32
    if norm is not None:
        x = rms_norm(x, norm, eps, early=early)
    parts = arrived = out
    if tiles.splits > 1:
        assert grid <= MOST_SPLIT_BLOCKS
        parts = torch.empty((tiles.splits, block, columns), dtype=torch.float32, device=x.device)
        arrived = counters(x.device, MOST_SPLIT_BLOCKS)
    matrix_kernel[grid + programs, tiles.splits](
        x, weight, bias, out, parts, arrived, *own, rows, BLOCK_M=block, SPLITS=tiles.splits, num_stages=tiles.stages,
        **fixed,
    )  # fmt: skip
