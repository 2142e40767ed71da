"""Common part of the attention kernels in Triton: the online softmax over entries of a row's pages, in base 2."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.splits_triton import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def computable(x):
    """Return x, in float32 if it is bfloat16 in Triton's interpreter, whose bfloat16 arithmetic is wrong."""
    return x.to(tl.float32) if _INTERPRETED and x.dtype == tl.bfloat16 else x


@triton.jit
def no_sums(M: tl.constexpr, D_PAD: tl.constexpr):
    """Return the sums of an online softmax over no entries: acc [M, D_PAD], total and top [M]."""
    total = tl.zeros([M], tl.float32)
    return tl.zeros([M, D_PAD], tl.float32), total, tl.full([M], float("-inf"), tl.float32)


@triton.jit
def with_tile(acc, total, top, score, v):
    """Return the sums of an online softmax with one more tile, of scores [M, N] and values [N, D_PAD]."""
    new_top = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def entries(keys, values, where, there, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Load keys [D_PAD, N] and values [N, D_PAD] at `where` [N]. MASKED: zeros unless `there`."""
    offs_d = tl.arange(0, D_PAD)
    if MASKED:
        k = tl.load(keys + where[None, :] + offs_d[:, None], mask=tl.trans(there), other=0.0)
        v = tl.load(values + where[:, None] + offs_d[None, :], mask=there, other=0.0)
    else:
        k = tl.load(keys + where[None, :] + offs_d[:, None])
        v = tl.load(values + where[:, None] + offs_d[None, :])
    return computable(k), computable(v)


@triton.jit
def attend(
    acc, total, top, q, keys, values, table, position, scale, low, high, page_stride, ENTRY: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, D_PAD] over entries low .. high of one row: acc [M, D_PAD], total and top [M].

    MASKED: `high` ends inside a tile, or some query's `position` [M] is before it. Masked entries are not loaded, so
    that NaN left in a reused page has no effect. AHEAD: page ids are loaded a tile ahead, so that the pipeline of keys
    and values need not wait for them.
    """
    D_PAD: tl.constexpr = q.shape[1]
    offs_n = tl.arange(0, BLOCK_N)
    if AHEAD:
        next_page = tl.load(table + (low + offs_n) // PAGE, mask=low + offs_n < high, other=0)
    for at in range(low, high, BLOCK_N):
        entry = at + offs_n
        if AHEAD:
            page = next_page
            next_page = tl.load(table + (entry + BLOCK_N) // PAGE, mask=entry + BLOCK_N < high, other=0)
        elif MASKED:
            page = tl.load(table + entry // PAGE, mask=entry < high, other=0)
        else:
            page = tl.load(table + entry // PAGE)
        where = page.to(tl.int64) * page_stride + (entry % PAGE) * ENTRY
        there = (entry < high)[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
        k, v = entries(keys, values, where, there, D_PAD, MASKED or D != D_PAD)
        score = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            score = tl.where((entry[None, :] <= position[:, None]) & (entry < high)[None, :], score, float("-inf"))
        acc, total, top = with_tile(acc, total, top, score, v)
    return acc, total, top


@triton.jit
def head_of(cache, layer, head, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return the addresses of a layer's keys and values of a KV head in the first page."""
    keys = cache + layer * (2 * PAGE * HEADS * D) + head * D
    return keys, keys + PAGE * HEADS * D


@triton.jit
def chunk_of(starts, chunks, block, BLOCK_Q: tl.constexpr, SPARE: tl.constexpr):
    """Find the chunk of a block of queries: the blocks of chunk c begin at starts[c] // BLOCK_Q + SPARE * c."""
    chunk = 0
    last = chunks
    while chunk < last:
        middle = (chunk + last + 1) // 2
        before = tl.load(starts + middle).to(tl.int32) // BLOCK_Q + SPARE * middle <= block
        chunk = tl.where(before, middle, chunk)
        last = tl.where(before, last, middle - 1)
    return chunk
