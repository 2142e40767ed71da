"""What adapters add to products of few rows, in Triton, inside the kernels that these take anyway.

An adapter adds up.T @ (down @ x). Its first half is done where x is made, by the norm before a product, or else by
further programs of the product that reads x; its second half where that product is stored, or else by the norm after
it. So rows with adapters cost no launch. Each row reads its own adapter alone: what it takes depends neither on how
many adapters there are nor on what other rows have, and rows without one (slot 0) read and add nothing.

Adapters and slots do not change in a forward, and what begins one waits for all before it. So a kernel that begins
early reads them before it waits for the kernel in front.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.library_triton import launch_options, prefetch

GROUP = tl.constexpr(16)
"""Lines of `down` that a program beside a product multiplies."""
DEPTH = tl.constexpr(512)
"""Inputs that it reads at a time."""
SHARE = 1536
"""Inputs that it reads at most."""
HELD = 16384
"""Numbers of an adapter that a program of the norm holds at a time."""


@triton.jit
def row_lines(up, slot, column, inside, at, N: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """The columns of `up` of each row's slot, CHUNK of its ranks from `at` on: [CHUNK, BLOCK_M, BLOCK_N]."""
    line = slot[None, :] * RANK + at + tl.arange(0, CHUNK)[:, None]
    mask = (slot > 0)[None, :, None] & inside[None, None, :]
    return tl.load(up + line[:, :, None] * N + column[None, None, :], mask=mask, other=0.0)


@triton.jit
def _of_projection(
    total, tile, place, slot, column, low, BEGIN: tl.constexpr, END: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Returns `total` with what lines `place` of the first half add to columns BEGIN .. END."""
    if GATED or (low < END) & (low + BLOCK_N > BEGIN):
        line = tl.load(place, mask=(slot > 0)[None, :], other=0.0)
        found = tl.sum(tile.to(tl.float32) * line[:, :, None], axis=0)
        total += tl.where((column >= BEGIN) & (column < END), found, 0.0)
    return total


@triton.jit
def add_expanded(
    total, held, up, inner, slot, token, column, inside, low, N: tl.constexpr, RANK: tl.constexpr,
    PROJECTIONS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Returns `total` [BLOCK_M, BLOCK_N] with the second half of the adapters added, of which `held` are first lines.

    inner [M, PROJECTIONS * RANK] float32: the first half. The columns of projections end at FIRST, SECOND and N. `low`
    is the first column, from which on they follow each other unless GATED.
    """
    for at in tl.static_range(0, RANK, CHUNK):
        tile = held
        if at > 0:
            tile = row_lines(up, slot, column, inside, at, N, RANK, CHUNK)
        place = inner + token[None, :] * (PROJECTIONS * RANK) + at + tl.arange(0, CHUNK)[:, None]
        total = _of_projection(total, tile, place, slot, column, low, 0, FIRST, BLOCK_N, GATED)
        if PROJECTIONS > 1:
            total = _of_projection(total, tile, place + RANK, slot, column, low, FIRST, SECOND, BLOCK_N, GATED)
        if PROJECTIONS > 2:
            total = _of_projection(total, tile, place + 2 * RANK, slot, column, low, SECOND, N, BLOCK_N, GATED)
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
    tile = tl.load(lines + k[None, :], mask=(k < tl.where(slot > 0, K, 0))[None, :], other=0.0)
    if EARLY:
        cuda.gdc_launch_dependents()
        if (PART > DEPTH) & (slot > 0):
            STEP: tl.constexpr = 1024 // down.dtype.element_ty.primitive_bitwidth
            for begin in tl.static_range(DEPTH, PART, DEPTH):
                at = share * PART + begin + tl.arange(0, DEPTH // STEP) * STEP
                prefetch(lines + tl.minimum(at, K - 1)[None, :])
        cuda.gdc_wait()
    if slot > 0:
        total = tl.zeros([GROUP, DEPTH], tl.float32)
        for begin in tl.static_range(0, PART, DEPTH):
            at = k + begin
            if begin > 0:
                tile = tl.load(lines + at[None, :], mask=(at < K)[None, :], other=0.0)
            total += tile.to(tl.float32) * tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        tl.store(inner + (share * M + row) * LINES + line, tl.sum(total, axis=1))


@triton.jit(do_not_specialize=["M"])
def adapted_norm_kernel(
    x, changed, before, up, norm, out, down, inner, slots, eps, M, WIDTH: tl.constexpr, SHARES: tl.constexpr,
    RANK: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (row, CHUNK of its lines): the norm `out` of x [M, WIDTH], and inner [M, LINES] of it, if LINES.

    before [SHARES, M, RANK] float32, if SHARES: the first half of what adapters add to x; `changed` gets the sum.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + row)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    own = (column < tl.where(slot > 0, WIDTH, 0))[None, :]
    step = tl.arange(0, CHUNK)
    line = part * CHUNK + step
    uppers = up + (slot * RANK + step)[:, None] * WIDTH + column[None, :]
    if SHARES > 0:
        held = tl.load(uppers, mask=own, other=0.0)
    if LINES > 0:
        tile = tl.load(down + (slot * LINES + line)[:, None] * WIDTH + column[None, :], mask=own, other=0.0)
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    if (part == 0) | (slot > 0):
        at = row.to(tl.int64) * WIDTH + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if SHARES > 0:
            for first in tl.static_range(0, RANK, CHUNK):
                if first > 0:
                    held = tl.load(uppers + first * WIDTH, mask=own, other=0.0)
                ranks = tl.zeros([CHUNK], tl.float32)
                for share in tl.static_range(SHARES):
                    place = before + (share * M + row) * RANK + first + step
                    ranks += tl.load(place, mask=step < tl.where(slot > 0, CHUNK, 0), other=0.0)
                value += tl.sum(held.to(tl.float32) * ranks[:, None], axis=0)
            # The norm is of what the next layer reads: the sum rounded to its dtype.
            kept = value.to(x.dtype.element_ty)
            if part == 0:
                tl.store(changed + at, kept, mask=inside)
            value = kept.to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
        normed = (value * scale * weight).to(out.dtype.element_ty)
        if part == 0:
            tl.store(out + at, normed, mask=inside)
        if LINES > 0:
            found = tl.sum(tile.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
            tl.store(inner + row * LINES + line, found, mask=line < tl.where(slot > 0, LINES, 0))


def adapted_norm(
    x: Tensor, before: Tensor | None, up: Tensor | None, slots: Tensor, norm: Tensor, eps: float, down: Tensor | None,
    early: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return x [M, H] with what `before` [shares, M, rank] and `up` add to it, its norm, and `down` of that [M, lines].

    Without `before` the first means nothing, without `down` the last. Those of rows of slot 0 in it never do.
    """
    assert x.is_contiguous() and norm.is_contiguous() and slots.is_contiguous()
    (rows, width), lines = x.shape, 0 if down is None else down.shape[1]
    changed, out = torch.empty_like(x), torch.empty_like(x)
    inner = torch.empty((rows, lines), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    chunk = max(1, min(16, HELD // block))
    shares = rank = 0
    if before is not None and up is not None:
        shares, rank = before.shape[0], up.shape[1]
    adapted_norm_kernel[rows, max(1, lines // chunk)](
        x, changed, x if before is None else before, x if up is None else up, norm, out, x if down is None else down,
        inner, slots, eps, rows, width, shares, rank, lines, early, block, chunk, num_warps=8, **launch_options(early),
    )  # fmt: skip
    return changed, out, inner


class Beside(NamedTuple):
    """What a product does for the adapters of its rows."""

    table: Tensor
    """`down` of a product that is added, else `up`; see `AdapterPart`"""
    inner: Tensor
    """float32: [shares, M, lines], written, of a product that is added; else read"""
    slots: Tensor
    """int64 [M]"""
    ends: tuple[int, ...]
    """The ends of the projections' columns"""

    @property
    def shares(self) -> int:
        return self.inner.shape[0] if self.inner.dim() == 3 else 1

    def programs(self) -> int:
        """How many programs its first half takes."""
        return len(self.slots) * self.shares * (self.table.shape[1] // GROUP.value)

    def fixed(self, elements: int, warps: int) -> dict[str, int | bool]:
        """Return the compile-time arguments of a kernel whose programs hold so many `elements` of the result."""
        first, second = self.ends[0], self.ends[min(1, len(self.ends) - 1)]
        held = max(1, min(16, 4096 * warps // elements))  # 128 numbers a thread
        rank = self.table.shape[1]
        return {
            "ADAPT": True, "RANK": rank, "PROJECTIONS": len(self.ends), "FIRST": first, "SECOND": second,
            "SHARES": self.shares, "CHUNK": min(rank, 1 << (held.bit_length() - 1)),
        }  # fmt: skip


NONE_BESIDE = {
    "ADAPT": False, "RANK": 0, "PROJECTIONS": 0, "FIRST": 0, "SECOND": 0, "SHARES": 0, "CHUNK": 0,
}  # fmt: skip
"""The compile-time arguments of a kernel that does nothing for adapters"""


def shares_of(depth: int) -> int:
    """Return in how many shares the first half of a product of this depth is made."""
    return -(-depth // SHARE)
