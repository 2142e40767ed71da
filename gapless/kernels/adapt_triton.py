"""Low-rank adapters in Triton: two small products grouped by slot, which read the adapters of their rows alone.

A program works on one slot and one block of tokens, and ends at once if no token of its block has that slot. Rows
without an adapter are never written, and stay the same to the bit.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.library_triton import operator
from gapless.kernels.unpack import unpacked

BLOCK_T = 16
"""Tokens of a block: a tensor core's minimum, since most batches are decode rows."""
MANY_TOKENS = 512
MANY_BLOCK_T = {2: 64, 4: 16}
"""Tokens of a block in batches of MANY_TOKENS and more, by the bytes of a number: wider ones would spill."""
BLOCK_K = 128
BLOCK_N = 128
LEAST_SHARE_DEPTH = 256
"""Least inputs of one share of the first product."""
MOST_SHARES = 16
"""Most shares of the inputs, each summed by its own program for few tokens."""


@triton.jit
def block_of_slot(slots, tokens, used, BLOCK_T: tl.constexpr):
    """Return the program's slot and tokens, and whether each has that slot. Programs of one block are adjacent."""
    one = tl.program_id(0) % (used - 1) + 1
    token = tl.program_id(0) // (used - 1) * BLOCK_T + tl.arange(0, BLOCK_T)
    return one.to(tl.int64), token, tl.load(slots + token, mask=token < tokens, other=0) == one


@triton.jit(do_not_specialize=["tokens", "used"])
def down_kernel(
    x, down, slots, parts, tokens, used, K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens and slot, projection, share of K): parts [shares, tokens, WIDTH] float32."""
    one, token, mine = block_of_slot(slots, tokens, used, BLOCK_T)
    if tl.max(mine.to(tl.int32), axis=0) > 0:
        rank = tl.program_id(1) * RANK + tl.arange(0, RANK)
        share = tl.program_id(2)
        k = tl.arange(0, BLOCK_K)
        values = x + token.to(tl.int64)[:, None] * K + k[None, :]
        lines = down + one * WIDTH * K + rank[None, :] * K + k[:, None]
        total = tl.zeros([BLOCK_T, RANK], tl.float32)
        for at in range(share * DEPTH, tl.minimum((share + 1) * DEPTH, K), BLOCK_K):
            there = at + k < K
            value = tl.load(values + at, mask=mine[:, None] & there[None, :], other=0.0)
            tile = tl.load(lines + at, mask=there[:, None], other=0.0)
            total = tl.dot(value, tile, total, input_precision="ieee")
        place = (share * tokens + token).to(tl.int64)[:, None] * WIDTH + rank[None, :]
        tl.store(parts + place, total, mask=mine[:, None])


@triton.jit(do_not_specialize=["tokens", "used"])
def up_kernel(
    y, up, slots, parts, tokens, used, first, second, last, N: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    SHARES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens and slot, block of columns, projection): adds to y [tokens, N].

    The columns of the projections end at `first`, `second` and `last`.
    """
    number = tl.program_id(2)
    begin = tl.where(number == 0, 0, tl.where(number == 1, first, second))
    end = tl.where(number == 0, first, tl.where(number == 1, second, last))
    one, token, mine = block_of_slot(slots, tokens, used, BLOCK_T)
    column = begin + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < end
    if (tl.max(mine.to(tl.int32), axis=0) > 0) & (begin + tl.program_id(1) * BLOCK_N < end):
        rank = tl.arange(0, RANK)
        inner = tl.zeros([BLOCK_T, RANK], tl.float32)
        for share in range(SHARES):
            place = (share * tokens + token).to(tl.int64)[:, None] * WIDTH + number * RANK + rank[None, :]
            inner += tl.load(parts + place, mask=mine[:, None], other=0.0)
        found = y + token.to(tl.int64)[:, None] * N + column[None, :]
        changed = mine[:, None] & inside[None, :]
        total = tl.load(found, mask=changed, other=0.0).to(tl.float32)
        tile = tl.load(up + (one * RANK + rank)[:, None] * N + column[None, :], mask=inside[None, :], other=0.0)
        total = tl.dot(inner.to(tile.dtype), tile, total, input_precision="ieee")
        tl.store(found, total.to(y.dtype.element_ty), mask=changed)


def _adapt(x: Tensor, y: Tensor, slots: Tensor, down: Tensor, up: Tensor, ends: list[int]) -> None:
    x = x.contiguous()
    for tensor in (y, slots, down, up):
        assert tensor.is_contiguous()
    (tokens, depth), (used, width, _), rank, columns = x.shape, down.shape, up.shape[1], y.shape[1]
    high = MANY_BLOCK_T[x.element_size()] if tokens >= MANY_TOKENS else BLOCK_T
    blocks = triton.cdiv(tokens, high)
    # Many tokens make enough programs.
    shares = 1 if tokens >= MANY_TOKENS else max(1, min(MOST_SHARES, depth // LEAST_SHARE_DEPTH))
    share = triton.cdiv(triton.cdiv(depth, shares), BLOCK_K) * BLOCK_K
    parts = torch.empty(shares, tokens, width, dtype=torch.float32, device=x.device)
    down_kernel[blocks * (used - 1), width // rank, shares](
        x, down, slots, parts, tokens, used, depth, width, rank, share, high, BLOCK_K, num_warps=4, num_stages=3
    )
    first, second, last = ends[0], ends[min(1, len(ends) - 1)], ends[-1]
    widest = max(end - begin for begin, end in zip((0, *ends), ends, strict=False))
    up_kernel[blocks * (used - 1), triton.cdiv(widest, BLOCK_N), len(ends)](
        y, up, slots, parts, tokens, used, first, second, last, columns, width, rank, shares, high, BLOCK_N,
        num_warps=4, num_stages=2,
    )  # fmt: skip


adapt = unpacked(operator(_adapt, "y"))
