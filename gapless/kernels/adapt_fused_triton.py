"""Adapter terms in products of decode rows, in Triton, inside kernels that run anyway.

An adapter adds up.T @ (down @ x). The first half is computed with x, by the norm before a product, or else by further
programs of the product that reads x; the second half is computed when the product is stored, or by its reader: the
norm. So adapters cost few rows no launch. Each row reads its own adapter
alone: its cost depends neither on the number of adapters nor on other rows, and rows without one (slot 0) read and add
nothing.

Adapters and slots do not change in a forward, whose first kernel waits for everything before it. So a kernel that
begins early reads them before it waits for the previous kernel.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.library_triton import arch, launch_options, prefetch

RANKS = tl.constexpr(16)
"""Lines of `up` held by a program of a product before its input is ready: the least rank."""
GROUP = tl.constexpr(16)
"""Lines of `down` multiplied by a further program of a product."""
DEPTH = tl.constexpr(512)
"""Inputs read by it at a time."""
MOST_INPUTS = {128: 3072, 256: 1536}
"""Most inputs read by such a program, by the greatest number of rows."""
HELD = 16384
"""Numbers of each projection of an adapter held by a program of the norm."""
HELD_UPPER = 65536
"""Numbers of added lines held by it as well"""
FEW = tl.constexpr(8)
"""Most rows with an adapter whose lines further programs of the norm share: with more, the next product would find too
few multiprocessors to prefetch its weight."""
NORM_PIECE = tl.constexpr(128)
"""Columns read by half a warp of the norm at a time."""
MOST_HELD = 64
"""A program of the norm holds the lines of all projections, alone on its multiprocessor, for up to this many rows."""
NORM_WARPS = 8


@triton.jit
def first_of(lines, mask, N: tl.constexpr):
    """Load the first RANKS of lines of N numbers, as tensors like the pointers `lines`, in a tuple."""
    held = ()
    for rank in tl.static_range(RANKS):
        held = held + (tl.load(lines + rank * N, mask=mask, other=0.0),)  # noqa: RUF005 (Triton unpacks none)
    return held


@triton.jit
def with_lines(total, held, lines, mask, sums, N: tl.constexpr, RANK: tl.constexpr):
    """Return `total` plus RANK `lines` times their `sums`; held: `first_of` them."""
    for rank in tl.static_range(RANK):
        if rank < RANKS:
            line = held[rank]
        else:
            line = tl.load(lines + rank * N, mask=mask, other=0.0)
        total += line.to(tl.float32) * tl.load(sums + rank).to(tl.float32)
    return total


def inner_strides(inner: Tensor | None) -> tuple[int, int]:
    """Return the strides of rows and slots in the adapters' first half [rows, slots, lines]."""
    return (0, 0) if inner is None else (inner.stride(0), inner.stride(1))


@triton.jit
def first_lines(up, slot, column, inside, N: tl.constexpr, RANK: tl.constexpr):
    """The first RANKS lines of `up` of each row's slot: a tuple of tensors [BLOCK_M, BLOCK_N]."""
    mine = (slot > 0)[:, None] & inside[None, :]
    return first_of(up + (slot * (RANK * N))[:, None] + column[None, :], mine, N)


@triton.jit
def _first_sums(inner, slot, token, number, RANK: tl.constexpr, PROJECTIONS: tl.constexpr):
    """The first RANKS sums of a projection of each row: a tuple of tensors [BLOCK_M]."""
    place = inner + token * (PROJECTIONS * RANK) + number * RANK
    sums = ()
    for rank in tl.static_range(RANKS):
        sums = sums + (tl.load(place + rank, mask=slot > 0, other=0.0),)  # noqa: RUF005 (Triton unpacks none)
    return sums


@triton.jit
def _projection(column, PROJECTIONS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    number = column * 0
    if PROJECTIONS > 1:
        number += (column >= FIRST).to(tl.int32)
    if PROJECTIONS > 2:
        number += (column >= SECOND).to(tl.int32)
    return number


@triton.jit
def _begins_inside(low, begin: tl.constexpr, BLOCK_N: tl.constexpr):
    return (low < begin) & (low + BLOCK_N > begin)


@triton.jit
def _add_lines(
    total, up, inner, slot, token, column, inside, number, N: tl.constexpr, FROM: tl.constexpr, END: tl.constexpr,
    RANK: tl.constexpr, PROJECTIONS: tl.constexpr,
):  # fmt: skip
    """Add ranks FROM .. END of projection `number` to the `inside` columns."""
    mine = (slot > 0)[:, None] & inside[None, :]
    lines = up + (slot * (RANK * N))[:, None] + column[None, :]
    place = inner + token * (PROJECTIONS * RANK) + number * RANK
    for rank in tl.static_range(FROM, END):
        tile = tl.load(lines + rank * N, mask=mine, other=0.0).to(tl.float32)
        total += tile * tl.load(place + rank, mask=slot > 0, other=0.0)[:, None]
    return total


@triton.jit
def expanded(
    held, some, up, inner, slot, column, inside, low, N: tl.constexpr, RANK: tl.constexpr, PROJECTIONS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return the adapters' second half: [BLOCK_M, BLOCK_N] float32, zeros unless `some` row has one.

    held: `first_lines`. inner [M, PROJECTIONS * RANK] float32: the first half. The columns of projections end at FIRST,
    SECOND and N. Columns run from `low`, unless GATED.
    """
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if some > 0:
        token = tl.arange(0, BLOCK_M)
        own = _projection(column, PROJECTIONS, FIRST, SECOND)
        if GATED:
            gates = _first_sums(inner, slot, token, 0, RANK, PROJECTIONS)
            ups = _first_sums(inner, slot, token, 1, RANK, PROJECTIONS)
            for rank in tl.static_range(RANKS):
                factor = tl.where((own == 0)[None, :], gates[rank][:, None], ups[rank][:, None])
                total += held[rank].to(tl.float32) * factor
        else:
            number = _projection(low, PROJECTIONS, FIRST, SECOND)
            sums = _first_sums(inner, slot, token, number, RANK, PROJECTIONS)
            for rank in tl.static_range(RANKS):
                total += held[rank].to(tl.float32) * sums[rank][:, None]
            if PROJECTIONS > 1:
                total = tl.where((own == number)[None, :], total, 0.0)
            for other in tl.static_range(1, PROJECTIONS):
                # A tile with columns of several projections.
                if _begins_inside(low, FIRST if other == 1 else SECOND, BLOCK_N):
                    there = inside & (own == other)
                    total = _add_lines(
                        total, up, inner, slot, token, column, there, other, N, 0, RANKS, RANK, PROJECTIONS
                    )
        if RANK > RANKS:
            for each in tl.static_range(PROJECTIONS):
                there = inside & (own == each)
                total = _add_lines(
                    total, up, inner, slot, token, column, there, each, N, RANKS, RANK, RANK, PROJECTIONS
                )
    return total


@triton.jit
def shrink(
    x, down, inner, slots, program, M, K: tl.constexpr, LINES: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr
):
    """Program (row, share of K, group of lines): inner [SHARES, M, LINES] float32 gets `down` of the row's slot @ x."""
    GROUPS: tl.constexpr = LINES // GROUP
    PART: tl.constexpr = (K + SHARES * DEPTH - 1) // (SHARES * DEPTH) * DEPTH
    row = program // (GROUPS * SHARES)
    share = program // GROUPS % SHARES
    slot = tl.load(slots + row, mask=row < M, other=0)
    line = program % GROUPS * GROUP + tl.arange(0, GROUP)
    k = share * PART + tl.arange(0, DEPTH)
    lines = down + (slot * LINES + line)[:, None] * K
    own = tl.zeros([GROUP, 1], tl.int64) + slot > 0
    tile = tl.load(lines + k[None, :], mask=own & (k < K)[None, :], other=0.0)
    if EARLY:
        cuda.gdc_launch_dependents()
        if (PART > DEPTH) & (slot > 0):
            STEP: tl.constexpr = 1024 // down.dtype.element_ty.primitive_bitwidth
            for begin in tl.static_range(DEPTH, PART, DEPTH):
                at = share * PART + begin + tl.arange(0, DEPTH // STEP) * STEP
                prefetch(lines + tl.minimum(at, K - 1)[None, :])
    if slot > 0:  # the others need not wait: multiplying programs do
        if EARLY:
            cuda.gdc_wait()
        total = tl.zeros([GROUP, DEPTH], tl.float32)
        for begin in tl.static_range(0, PART, DEPTH):
            at = k + begin
            if begin > 0:
                tile = tl.load(lines + at[None, :], mask=(at < K)[None, :], other=0.0)
            total += tile.to(tl.float32) * tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        tl.store(inner + (share * M + row) * LINES + line, tl.sum(total, axis=1))


@triton.jit
def _own_work(program, slots, M, PROJECTIONS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a program's row, and the range of projections whose lines it computes.

    Programs from M on compute one projection each, of rows with an adapter, if these are at most FEW.
    """
    FURTHER: tl.constexpr = max(PROJECTIONS - 1, 1)
    token = tl.arange(0, BLOCK_M)
    adapted = (tl.load(slots + token, mask=token < M, other=0) > 0).to(tl.int32)
    count = tl.sum(adapted, axis=0)
    if program < M:
        row, low, end = program, 0, tl.where(count <= FEW, 1, PROJECTIONS)
    else:
        place, low = (program - M) // FURTHER, 1 + (program - M) % FURTHER
        mine = (adapted > 0) & (tl.cumsum(adapted, axis=0) == place + 1)
        row = tl.sum(tl.where(mine, token, 0), axis=0)
        end = tl.where((count <= FEW) & (place < count), low + 1, low)
    return row, low, end


@triton.jit(do_not_specialize=["M"])
def adapted_norm_kernel(
    x, changed, before, up, norm, out, down, inner, slots, eps, M, WIDTH: tl.constexpr, SHARES: tl.constexpr,
    RANK: tl.constexpr, LINES: tl.constexpr, PROJECTIONS: tl.constexpr, EARLY: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, HOLD: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Computes the norm `out` of x [M, WIDTH], and inner [M, LINES] of it: a program a row and CHUNK lines.

    before [SHARES, M, RANK] float32, if SHARES: the first half of x's adapter terms; `changed` gets the sum. inner is
    computed from the unrounded norm. The lines of the first TILES projections are loaded before the previous kernel
    ends. Programs from M on: see `_own_work`.
    """
    program = tl.program_id(0)
    part = tl.program_id(1)
    row = program
    if LINES > 0:
        row, low, end = _own_work(program, slots, M, PROJECTIONS, BLOCK_M)
    slot = tl.load(slots + row)
    if LINES > 0:
        slot = tl.where(low < end, slot, 0)
    WIDE: tl.constexpr = min(NORM_PIECE, BLOCK)
    column = tl.arange(0, BLOCK // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    inside = column < WIDTH
    own = inside & (column * 0 + slot > 0)
    uppers = up + slot * (RANK * WIDTH) + column
    held = ()
    if SHARES > 0:
        for rank in tl.static_range(HOLD):
            held = held + (tl.load(uppers + rank * WIDTH, mask=own, other=0.0),)  # noqa: RUF005 (Triton unpacks none)
    first = (part == 0) & (program < M)
    if LINES > 0:
        # Each line is in one half of a warp (Triton 3.6), so that its sum takes few shuffles.
        line = part * CHUNK + tl.arange(0, CHUNK)
        lines = down + (slot * LINES + line)[:, None, None] * WIDTH + column[None, :, :]
        tiles = ()
        for each in tl.static_range(TILES):
            mine = own & (column * 0 + end > low + each)
            tile = tl.load(lines + (low + each) * (LINES // PROJECTIONS) * WIDTH, mask=mine[None, :, :], other=0.0)
            tiles = tiles + (tile,)  # noqa: RUF005 (Triton unpacks none)
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        cuda.gdc_launch_dependents()
    # The others need not wait: the row's first program does.
    if first | (slot > 0):
        if EARLY:
            cuda.gdc_wait()
        at = row.to(tl.int64) * WIDTH + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if SHARES > 0:
            if slot > 0:
                for rank in tl.static_range(RANK):
                    total = tl.load(before + row * RANK + rank)
                    for share in tl.static_range(1, SHARES):
                        total += tl.load(before + (share * M + row) * RANK + rank)
                    if rank < HOLD:
                        value += held[rank].to(tl.float32) * total
                    else:
                        value += tl.load(uppers + rank * WIDTH, mask=own, other=0.0).to(tl.float32) * total
            # The norm uses the sum rounded to x's dtype, as the next layer reads it.
            kept = value.to(x.dtype.element_ty)
            if first:
                tl.store(changed + at, kept, mask=inside)
            value = kept.to(tl.float32)
        scale = tl.rsqrt(tl.sum(tl.sum(value * value, axis=1), axis=0) / WIDTH + eps)
        if first:
            tl.store(out + at, (value * scale * weight).to(out.dtype.element_ty), mask=inside)
        if LINES > 0:
            value *= weight
            for each in tl.static_range(PROJECTIONS):
                if (slot > 0) & (low + each < end):
                    begin = (low + each) * (LINES // PROJECTIONS)
                    if each < TILES:
                        tile = tiles[each]
                    else:
                        tile = tl.load(lines + begin * WIDTH, mask=inside[None, :, :], other=0.0)
                    found = tl.sum(tl.sum(tile.to(tl.float32) * value[None, :, :], axis=1), axis=1)
                    tl.store(inner + row * LINES + begin + line, found * scale)


def adapted_norm(
    x: Tensor, before: Tensor | None, up: Tensor | None, slots: Tensor, norm: Tensor, eps: float, down: Tensor | None,
    projections: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return x [M, H] with the adapter terms of `before` [shares, M, rank] and `up`, its norm, and `down` of that [M,
    lines].

    Without `before` the first result is undefined, without `down` the last, as always in rows of slot 0.
    """
    assert x.is_contiguous() and norm.is_contiguous() and slots.is_contiguous() and len(x) <= max(MOST_INPUTS)
    (rows, width), lines = x.shape, 0 if down is None else down.shape[1]
    changed, out = torch.empty_like(x), torch.empty_like(x)
    inner = torch.empty((rows, lines), dtype=torch.float32, device=x.device)
    block, early = triton.next_power_of_2(width), arch(x.device).early
    chunk = max(1, min(16, HELD // block))
    shares = rank = 0
    if before is not None and up is not None:
        shares, rank = before.shape[0], up.shape[1]
    hold = min(rank, max(1, min(16, HELD_UPPER // block)))
    programs, parts = rows, 1
    if down is not None:
        programs, parts = rows + int(FEW.value) * (projections - 1), lines // projections // chunk
    adapted_norm_kernel[programs, parts](
        x, changed, x if before is None else before, x if up is None else up, norm, out, x if down is None else down,
        inner, slots, eps, rows, width, shares, rank, lines, projections, early, 32 if rows <= 32 else 256, block,
        chunk, hold, projections if rows <= MOST_HELD else min(projections, 1),
        num_warps=NORM_WARPS, **launch_options(early),
    )  # fmt: skip
    return changed, out, inner


class AdapterWork(NamedTuple):
    """A product's work for the adapters of its rows."""

    table: Tensor
    """`down` of an added product, else `up`; see `AdapterPart`"""
    inner: Tensor
    """float32 [shares, M, lines]: written by an added product, else read"""
    slots: Tensor
    """int64 [M]"""
    ends: tuple[int, ...]
    """The ends of the projections' columns"""

    @property
    def shares(self) -> int:
        return self.inner.shape[0] if self.inner.dim() == 3 else 1

    def programs(self) -> int:
        """Return the number of programs of the first half."""
        return len(self.slots) * self.shares * (self.table.shape[1] // int(GROUP.value))

    def fixed(self) -> dict[str, int | bool]:
        """Return the compile-time arguments of a kernel."""
        first, second = self.ends[0], self.ends[min(1, len(self.ends) - 1)]
        return {
            "ADAPT": True, "RANK": self.table.shape[1], "PROJECTIONS": len(self.ends), "FIRST": first, "SECOND": second,
            "SHARES": self.shares,
        }  # fmt: skip


NO_ADAPTERS = {"ADAPT": False, "RANK": 0, "PROJECTIONS": 0, "FIRST": 0, "SECOND": 0, "SHARES": 0}
"""Compile-time arguments of a kernel without adapters"""


def shares_of(depth: int, rows: int) -> int:
    """Return the number of shares of the first half of a product of this depth."""
    return -(-depth // next(share for most, share in MOST_INPUTS.items() if rows <= most))
