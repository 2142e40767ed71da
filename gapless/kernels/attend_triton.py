"""Common part of the attention kernels in Triton: the online softmax over entries of a row's pages, in base 2."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gapless.kernels.kv_triton import keys_of, values_of
from gapless.kernels.splits_triton import CAUSAL, LOG2_E, first_entry

_LOG2_E = tl.constexpr(LOG2_E)


def score_factor(scale: float, softcap: float) -> float:
    """Return the factor of `score`: it makes scores for exp2, or twice the argument of tanh for exp2."""
    return scale * LOG2_E * (2 / softcap if softcap else 1)


@triton.jit
def score_of(q, k, factor, CAP: tl.constexpr):
    """Return the scores of q [M, D_PAD] and k [D_PAD, N] for exp2, capped at CAP unless that is 0."""
    score = tl.dot(q, k, input_precision="ieee") * factor
    if CAP > 0:
        # tanh x = 1 - 2 / (exp 2x + 1), also where exp is infinite.
        score = CAP * _LOG2_E - 2 * CAP * _LOG2_E / (tl.exp2(score) + 1)
    return score


@triton.jit
def no_sums(M: tl.constexpr, D_PAD: tl.constexpr):
    """Return the sums of an online softmax over no entries: acc [M, D_PAD], total and top [M]."""
    total = tl.zeros([M], tl.float32)
    return tl.zeros([M, D_PAD], tl.float32), total, tl.full([M], float("-inf"), tl.float32)


@triton.jit
def with_tile(acc, total, top, score, v, EMPTY: tl.constexpr):
    """Return the sums of an online softmax with one more tile, of scores [M, N] and values [N, D_PAD].

    EMPTY: all scores of a query up to here may be -inf.
    """
    new_top = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if EMPTY else new_top
    weight = tl.exp2(score - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def attend(
    acc, total, top, q, keys, values, pairs, table, first, last, factor, low, high, page_stride, ENTRY: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, AHEAD: tl.constexpr,
    EDGE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [M, D_PAD] over entries low .. high of one row: acc [M, D_PAD], total and top [M].

    MASKED: `high` ends inside a tile, or some query's `last` entry [M] is before it. With EDGE, `low` may be inside a
    tile too, or some query's `first` entry [M] be after it. Masked entries are not loaded, so that NaN left in a reused
    page has no effect. AHEAD: page ids are loaded a tile ahead, so that the pipeline of keys and values need not wait
    for them.
    """
    D_PAD: tl.constexpr = q.shape[1]
    CUT: tl.constexpr = MASKED and EDGE
    offs_n = tl.arange(0, BLOCK_N)
    floor = low
    if CUT:
        low = low // BLOCK_N * BLOCK_N
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
        base = page.to(tl.int64) * page_stride
        where = base + entry % PAGE * ENTRY
        inside = (entry >= floor) & (entry < high) if CUT else entry < high
        there = inside[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
        k = keys_of(keys, where, there, q, MASKED or D != D_PAD)
        v = values_of(values, pairs, where, base, entry % PAGE, there, q, ENTRY, D, MASKED or D != D_PAD)
        score = score_of(q, k, factor, CAP)
        if MASKED:
            score = tl.where((entry[None, :] <= last[:, None]) & inside[None, :], score, float("-inf"))
        if CUT:
            score = tl.where(entry[None, :] >= first[:, None], score, float("-inf"))
        acc, total, top = with_tile(acc, total, top, score, v, CUT)
    return acc, total, top


@triton.jit
def ranges(spans, token, position, real, length, REACH: tl.constexpr, SIZE: tl.constexpr):
    """Return the first and last entry that each query of a tile reads, [M] each."""
    first, last = first_entry(position, REACH, SIZE), position
    if spans is not None:
        first = tl.minimum(first, tl.load(spans + token * 2, mask=real, other=0))
        last = tl.maximum(last, tl.minimum(tl.load(spans + token * 2 + 1, mask=real, other=0), length) - 1)
    return first, last


@triton.jit
def borders(
    spans, first, last, real, low, high, BLOCK_N: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return the borders of the entries that a block of queries at the positions low .. high reads: the first entry,
    begin and end of the tiles that every query reads in whole, and the end."""
    floor, begin, end = first_entry(low, REACH, SIZE), first_entry(high - 1, REACH, SIZE), low + 1
    if spans is not None:
        floor, begin = tl.min(tl.where(real, first, floor)), tl.max(tl.where(real, first, 0))
        end, high = tl.min(tl.where(real, last, high)) + 1, tl.max(tl.where(real, last, 0)) + 1
    end = end // BLOCK_N * BLOCK_N
    if REACH != CAUSAL or spans is not None:
        end = tl.maximum(end, 0)  # an inert row has fewer entries than queries
        begin = tl.minimum(tl.cdiv(begin, BLOCK_N) * BLOCK_N, end)
    return floor, begin, end, high


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
