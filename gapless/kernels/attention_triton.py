"""Paged attention in Triton: split-KV decode, and prefill of chunks of any size in one launch. Reference: attention.py.

Decode is flash decoding: one program per (row, KV head, split) attends over a range of the row, and the partial results
are combined by their log-sums. Prefill is flash attention over pages with the query heads of one KV head in the same
tile; a program finds its chunk by binary search in the chunks' offsets. A few tokens after a long context are split
like rows of a decode. Both use the online softmax in base 2.

The host gives bounds and never a length: the grid follows from shapes, and programs read the lengths and return at once
beyond them. So a launch is the same for all table contents, and can be captured.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.attend_triton import attend, borders, chunk_of, no_sums, ranges, score_factor, score_of, with_tile
from gapless.kernels.kv_triton import (
    computable,
    head_of,
    key_scaled,
    keys_of,
    store_keys,
    store_nibbles,
    value_columns,
    value_scaled,
    values_of,
)
from gapless.kernels.library_triton import arch, counters, launch_options, operator
from gapless.kernels.rope_triton import angle_of, turned
from gapless.kernels.splits_triton import (
    AT_ONCE_PER_SM,
    CAUSAL,
    GRID_PER_SM,
    LEAST_IN_SPLIT,
    MANY_FROM,
    MANY_PER_SM,
    MOST_CHUNK_SPLITS,
    PROGRAMS_PER_SM,
    chunk_split_count,
    combine_chunks_kernel,
    combine_if_last,
    combine_kernel,
    first_entry,
    first_tile,
    most_read,
    split_count,
    split_size,
    split_space,
    with_sink,
)
from gapless.kernels.tiles import AttentionTiles, DecodeAttention, PromptAttention, choose_tiles
from gapless.kernels.views import Rotation

LEAST_IN_CHUNK = tl.constexpr(256)
"""A block is split only if all of its queries may read at least this many entries."""
TABLES = ["rows", "starts", "lens", "slots"]
"""Small tensors that may start anywhere in a larger one: their alignment must not compile a launch again."""


@triton.jit
def _pages_of(table, at, high, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr):
    """Load the pages of a tile's runs of entries from `at` on, [BLOCK_N // RUN]."""
    entry = at + tl.arange(0, BLOCK_N // RUN) * RUN
    return tl.load(table + entry // PAGE, mask=entry < high, other=0)


@triton.jit
def _attend_row(
    q, keys, values, pairs, table, page, first, factor, low, high, page_stride, ENTRY: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, EDGE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """`attend` to all entries low .. high of one row, in fewer instructions. low is a multiple of BLOCK_N.

    page: `_pages_of` the first tile; a tile has RUN entries of a page in a row. Entries past `high`, and with EDGE
    entries before `first`, are not loaded.
    """
    D_PAD: tl.constexpr = q.shape[1]
    offs_n = tl.arange(0, BLOCK_N)
    acc, total, top = no_sums(q.shape[0], D_PAD)
    for at in range(low, high, BLOCK_N):
        entry = at + offs_n
        spread = tl.reshape(tl.broadcast_to(page[:, None], [BLOCK_N // RUN, RUN]), [BLOCK_N])
        # Multiplied last: the compiler must see that it is aligned, or it does not pipeline the loads.
        base = spread.to(tl.int64) * page_stride
        where = base + entry % PAGE * ENTRY
        # Loaded a tile ahead, so that the pipeline of keys and values need not wait for them.
        page = _pages_of(table, at + BLOCK_N, high, PAGE, BLOCK_N, RUN)
        inside = (entry >= first) & (entry < high) if EDGE else entry < high
        there = inside[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
        k = keys_of(keys, where, there, q, True)
        v = values_of(values, pairs, where, base, entry % PAGE, there, q, ENTRY, D, True)
        score = tl.where(inside[None, :], score_of(q, k, factor, CAP), float("-inf"))
        acc, total, top = with_tile(acc, total, top, score, v, False)
    return acc, total, top


@triton.jit
def _queries(
    line, head, qk_norm, cos, sin, eps, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    TURN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Load queries of the heads that share a KV head, repeated to [BLOCK_M, D_PAD]. TURN: norm and rotate them."""
    WIDE: tl.constexpr = triton.next_power_of_2(GROUP)
    D_PAD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16  # the least that tl.dot takes
    member = tl.arange(0, WIDE)[:, None]
    offs_d = tl.arange(0, D_PAD)[None, :]
    query = head * GROUP + member
    mine = (member < GROUP) & (offs_d < D)
    if TURN:
        tile = turned(line, query, qk_norm, cos, sin, eps, mine, D, D_PAD, NORM).to(line.dtype.element_ty)
    else:
        tile = tl.load(line + query * D + offs_d, mask=mine, other=0.0)
    return computable(tl.reshape(tl.broadcast_to(tile[None, :, :], [BLOCK_M // WIDE, WIDE, D_PAD]), [BLOCK_M, D_PAD]))


@triton.jit
def _write_entry(
    line, head, qk_norm, cos, sin, eps, keys, values, pairs, at, offset, scales, layer, HEADS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a token's key of one head, and write it and its value to the cache, to entry `offset` of the page
    at `at`."""
    D_PAD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16  # the least that tl.dot takes
    offs_d = tl.arange(0, D_PAD)[None, :]
    there = offs_d < D
    own = HEADS * GROUP + head + tl.zeros([1, 1], tl.int32)
    key = turned(line, own, qk_norm, cos, sin, eps, there, D, D_PAD, NORM)
    entry = at + offset * (HEADS * D)
    scale = None if scales is None else tl.load(scales + layer * 2)
    NIBBLES: tl.constexpr = values.dtype.element_ty == tl.uint8
    if not NIBBLES:  # before the key is stored: the compiler moves no load across a store
        value = tl.load(line + (own + HEADS) * D + offs_d, mask=there, other=0.0)
    store_keys(keys + entry + offs_d, key.to(line.dtype.element_ty), scale, there)
    if NIBBLES:
        column = tl.arange(0, D_PAD // 2)[None, :]
        left = line + (own + HEADS) * D + column
        inside = column < D // 2
        lefts, rights = tl.load(left, mask=inside, other=0.0), tl.load(left + D // 2, mask=inside, other=0.0)
        pair = (pairs + at + offset * (HEADS * 4)).to(tl.pointer_type(tl.float16), bitcast=True) + own * 0
        store_nibbles(values + at + offset * (HEADS * (D // 2)) + column, pair, lefts, rights, inside)
    else:
        scale = None if scales is None else tl.load(scales + layer * 2 + 1)
        store_keys(values + entry + offs_d, value, scale, there)
    # Stored by some threads, read by others.
    tl.debug_barrier()


@triton.jit(do_not_specialize=["layer", "batch", "wanted", "at_once", "least"], do_not_specialize_on_alignment=TABLES)
def decode_kernel(
    q, cache, table, scales, rows, lens, out, partial, logs, arrived, q_stride, page_stride, table_stride, layer, batch,
    wanted, at_once, least, factor, sinks, qk_norm, angles, slots, eps, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr,
    SPLITS_PAD: tl.constexpr, EARLY: tl.constexpr, MANY: tl.constexpr, ANGLES_ROW: tl.constexpr, TURN: tl.constexpr,
    NORM: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (KV head, row, split). A row of one split is finished here; with MANY, others too, by the last program.

    EARLY, MANY: the tables are ready before the previous kernel ends, and the next kernel begins late. TURN: keys and
    values follow q in memory, nothing is rotated yet, and the row's last entry is not in the cache yet. partial [B,
    heads, splits, D] and logs [B, heads, splits] in float32; arrived [B, KV heads] of zeros, left as zeros.
    """
    if EARLY and not MANY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    D_PAD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16  # the least that tl.dot takes
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    most = tl.num_programs(2)
    length = tl.load(lens + row).to(tl.int32)
    begin = first_tile(length, BLOCK_N, REACH, SIZE)
    reads = length - begin
    if SPLITS_PAD == 1:
        size = tl.cdiv(reads, BLOCK_N) * BLOCK_N
    else:
        size = split_size(lens, reads, batch, most, wanted, at_once, least, BLOCK_N, HEADS, MANY, REACH, SIZE)
    low = begin + split * size
    high = tl.minimum(low + size, length)
    offs_g = tl.arange(0, BLOCK_M)
    offs_d = value_columns(cache, D, D_PAD)
    query = head * GROUP + offs_g
    mine = (offs_g < GROUP)[:, None] & (offs_d < D)[None, :]
    place = out + row.to(tl.int64) * (HEADS * GROUP * D) + query[:, None] * D + offs_d[None, :]
    keys, values, pairs = head_of(cache, layer, head, HEADS, D, PAGE)
    pages = table + tl.load(rows + row) * table_stride
    page = _pages_of(pages, low, high, PAGE, BLOCK_N, RUN)
    cos, sin, slot = 0.0, 0.0, 0
    if TURN:
        slot = tl.load(slots + row)
        cos, sin = angle_of(angles, row, D, D_PAD, ANGLES_ROW)
    if EARLY and MANY:
        cuda.gdc_wait()
    if low >= length:
        if split == 0:
            tl.store(place, tl.zeros([BLOCK_M, D_PAD], tl.float32).to(out.dtype.element_ty), mask=mine)
        return
    factor = key_scaled(factor, scales, layer)
    line = q + row.to(tl.int64) * q_stride
    tile = _queries(line, head, qk_norm, cos, sin, eps, GROUP, D, BLOCK_M, TURN, NORM)
    if TURN and high == length:
        at = slot // PAGE * page_stride
        _write_entry(
            line, head, qk_norm, cos, sin, eps, keys, values, pairs, at, slot % PAGE, scales, layer, HEADS, GROUP, D,
            NORM,
        )  # fmt: skip
    acc, total, top = _attend_row(
        tile, keys, values, pairs, pages, page, first_entry(length - 1, REACH, SIZE), factor, low, high, page_stride,
        HEADS * D, D, PAGE, BLOCK_N, RUN, REACH != CAUSAL, CAP,
    )  # fmt: skip
    if EARLY and MANY:
        cuda.gdc_launch_dependents()
    if sinks is not None:
        whole = with_sink(total, top, sinks, tl.minimum(query, HEADS * GROUP - 1))
        total = tl.where(tl.cdiv(reads, size) == 1, whole, total)
    acc = value_scaled(acc / total[:, None], cache, scales, layer)
    splits = tl.cdiv(reads, size)
    if splits == 1:
        tl.store(place, acc.to(out.dtype.element_ty), mask=mine)
    elif SPLITS_PAD > 1:
        first = (row * HEADS * GROUP + query).to(tl.int64) * most
        tl.store(logs + first + split, top + tl.log2(total), mask=offs_g < GROUP)
        tl.store(partial + (first[:, None] + split) * D + offs_d[None, :], acc, mask=mine)
        if MANY:
            combine_if_last(out, partial, logs, sinks, arrived, row, head, splits, most, HEADS, GROUP, D, SPLITS_PAD)


@triton.jit(do_not_specialize=["layer", "tokens", "chunks"], do_not_specialize_on_alignment=TABLES)
def prefill_kernel(
    q, cache, table, scales, rows, starts, lens, spans, out, partial, logs, q_stride, page_stride, table_stride, layer,
    tokens, chunks, factor, sinks, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, REACH: tl.constexpr,
    SIZE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (KV head, block, split): BLOCK_Q queries of one chunk, times the GROUP heads that share a KV head.

    A spare block for each chunk (see `chunk_of`) leaves room for all of them, whatever the sizes are. The padding after
    the last chunk counts as one more chunk, with zeros as its result.

    SPLIT: splits share the entries readable by every query of the block; the first has the others too. Their results go
    to partial [tokens, heads, splits, D] and logs [tokens, heads, splits] in float32. With few entries the first split
    does it all, with an infinite log-sum and the result in `out`.
    """
    D_PAD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16  # the least that tl.dot takes
    AHEAD: tl.constexpr = q.dtype.element_ty.primitive_bitwidth > 16
    head = tl.program_id(0)
    # Later blocks of a chunk see more keys: they begin first, so that short ones end last.
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    chunk = chunk_of(starts, chunks, block, BLOCK_Q, 1)
    begin = tl.load(starts + chunk).to(tl.int32)
    end = tl.load(starts + chunk + 1, mask=chunk < chunks, other=tokens).to(tl.int32)
    first = (block - begin // BLOCK_Q - chunk) * BLOCK_Q
    if first >= end - begin:
        return
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = value_columns(cache, D, D_PAD)
    query = first + offs_m // GROUP
    token = (begin + query).to(tl.int64)
    lane = (head * GROUP + offs_m % GROUP)[:, None] * D
    real = (offs_m < BLOCK_Q * GROUP) & (query < end - begin)
    mine = real[:, None] & (offs_d < D)[None, :]
    place = out + token[:, None] * (HEADS * GROUP * D) + lane + offs_d[None, :]
    part = ((token * HEADS + head) * GROUP + offs_m % GROUP) * tl.num_programs(2) + tl.program_id(2)
    acc, total, top = no_sums(BLOCK_M, D_PAD)
    if chunk == chunks:
        tl.store(place, acc.to(out.dtype.element_ty), mask=mine)
        if SPLIT:
            tl.store(logs + part, float("inf"), mask=real)
        return
    straight = tl.arange(0, D_PAD)[None, :]
    line = q + token[:, None] * q_stride + lane + straight
    tile = computable(tl.load(line, mask=real[:, None] & (straight < D), other=0.0))
    factor = key_scaled(factor, scales, layer)
    length = tl.load(lens + chunk).to(tl.int32)
    start = length - (end - begin)
    keys, values, pairs = head_of(cache, layer, head, HEADS, D, PAGE)
    pages = table + tl.load(rows + chunk) * table_stride
    position = start + query
    high = tl.minimum(start + first + BLOCK_Q, length)
    EDGE: tl.constexpr = REACH != CAUSAL or spans is not None
    since, last = ranges(spans, token, position, real, length, REACH, SIZE)
    # First the tiles readable in whole by every query of the block, then the masked ones.
    floor, begin, clear, high = borders(spans, since, last, real, start + first, high, BLOCK_N, REACH, SIZE)
    low, until = begin, clear
    if SPLIT:
        few = clear - begin < LEAST_IN_CHUNK
        size = tl.cdiv(tl.cdiv(clear - begin, tl.where(few, 1, tl.num_programs(2))), BLOCK_N) * BLOCK_N
        low = tl.minimum(begin + tl.program_id(2) * size, clear)
        until = tl.minimum(low + size, clear)
        high = tl.where(tl.program_id(2) == 0, high, clear)
        begin = tl.where(tl.program_id(2) == 0, begin, 0)  # the first split has the masked tiles
        if few and tl.program_id(2) > 0:
            return
    acc, total, top = attend(
        acc, total, top, tile, keys, values, pairs, pages, since, last, factor, low, until, page_stride, HEADS * D, D,
        PAGE, BLOCK_N, False, AHEAD, EDGE, CAP,
    )  # fmt: skip
    if EDGE:
        acc, total, top = attend(
            acc, total, top, tile, keys, values, pairs, pages, since, last, factor, floor, begin, page_stride,
            HEADS * D, D, PAGE, BLOCK_N, True, AHEAD, EDGE, CAP,
        )  # fmt: skip
        clear = tl.maximum(clear, floor)
    acc, total, top = attend(
        acc, total, top, tile, keys, values, pairs, pages, since, last, factor, clear, high, page_stride, HEADS * D, D,
        PAGE, BLOCK_N, True, AHEAD, EDGE, CAP,
    )  # fmt: skip
    acc = value_scaled(acc, cache, scales, layer)
    if SPLIT:
        if not few:
            total = tl.where(total == 0, 1.0, total)  # NaN stays: the row is bad
            tl.store(logs + part, top + tl.log2(total), mask=real)
            tl.store(partial + part[:, None] * D + offs_d[None, :], acc / total[:, None], mask=mine)
            return
        tl.store(logs + part, float("inf"), mask=real)
    total = with_sink(total, top, sinks, head * GROUP + offs_m % GROUP)
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)


class AttentionShape(NamedTuple):
    """Shape of q and the cache, for both kernels."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    @classmethod
    def of(cls, q: Tensor, cache: Tensor, scales: Tensor | None) -> AttentionShape:
        page_size, kv_heads, width = cache.shape[3:]
        head_dim = q.shape[2]
        assert q.stride(2) == 1 and q.stride(1) == head_dim, (q.shape, q.stride())
        assert width == (head_dim if cache.dtype != torch.uint8 else head_dim // 2 * 3 + 4), (cache.shape, q.shape)
        assert cache.is_contiguous() and q.shape[1] % kv_heads == 0
        assert (scales is None) == (q.dtype == cache.dtype), (q.dtype, cache.dtype)
        return cls(q.shape[1], kv_heads, head_dim, page_size)

    @property
    def constants(self) -> dict[str, Any]:
        return {"HEADS": self.kv_heads, "GROUP": self.heads // self.kv_heads, "D": self.head_dim}


class Unturned(NamedTuple):
    """The work of `rope_and_write` in a decode whose keys and values follow its queries in memory."""

    rotation: Rotation
    slots: Tensor
    """See `LayerRows`"""


def decode_attention(
    q: Tensor, cache: Tensor, layer: int, page_table: Tensor, scales: Tensor | None, rows: Tensor, kv_lens: Tensor,
    scale: float, reach: int = 0, size: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, *,
    tiles: AttentionTiles | None = None, splits: int | None = None, per_sm: int | None = None, grid: int = GRID_PER_SM,
    least: int = LEAST_IN_SPLIT, many: bool | None = None, early: bool | None = None, unturned: Unturned | None = None,
) -> Tensor:  # fmt: skip
    """See attention.decode_attention. The keywords from `tiles` to `early` are for measuring.

    unturned: q is not rotated yet; the keys and values after it in memory go to the cache here.
    """
    shape = AttentionShape.of(q, cache, scales)
    gpu, batch = arch(q.device), q.shape[0]
    processors = gpu.processors
    if many is None:
        many = unturned is not None and batch >= MANY_FROM
    group = shape.heads // shape.kv_heads
    bits = 16 if scales is None else 4 if cache.dtype == torch.uint8 else 8
    tiles = tiles or choose_tiles(DecodeAttention(shape.head_dim, q.element_size(), group, many, bits), gpu)
    if early is None:
        # The other kernels of a step are early with few rows alone, so that no launch compiles again for its batch
        # size.
        early = unturned is not None and gpu.early
    wanted = (per_sm or (MANY_PER_SM if many else PROGRAMS_PER_SM)) * processors
    if splits is None:
        longest = most_read(page_table.shape[1] * shape.page_size, reach, size)
        splits = split_count(batch, shape.kv_heads, longest, wanted, grid * processors)
    out = torch.empty((batch, shape.heads * shape.head_dim), dtype=q.dtype, device=q.device)
    partial, logs = split_space(q, splits) if splits > 1 else (out, out)
    arrived = counters(q.device, GRID_PER_SM * processors) if many and splits > 1 else out
    assert arrived is out or batch * shape.kv_heads <= len(arrived)
    padded, reached = triton.next_power_of_2(splits), {"REACH": int(reach), "SIZE": size}
    (qk_norm, eps, angles), slots = unturned or (Rotation(None, 0.0, q), rows)
    decode_kernel[shape.kv_heads, batch, splits](
        q, cache, page_table, scales, rows, kv_lens, out, partial, logs, arrived, q.stride(0),
        cache.stride(0), page_table.stride(0), layer, batch, wanted, AT_ONCE_PER_SM * processors, least,
        score_factor(scale, softcap), sinks, q if qk_norm is None else qk_norm, angles, slots, eps,
        **shape.constants, **reached, ANGLES_ROW=0 if unturned is None else angles.stride(0), TURN=unturned is not None,
        NORM=qk_norm is not None, CAP=softcap, PAGE=shape.page_size, BLOCK_M=tiles.rows, BLOCK_N=tiles.entries,
        RUN=math.gcd(shape.page_size, tiles.entries), SPLITS_PAD=padded if many else min(padded, 2),
        EARLY=early, MANY=many, num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(early),
    )  # fmt: skip
    if splits > 1 and not many:
        combine_kernel[shape.heads, batch](
            kv_lens, out, partial, logs, sinks, batch, splits, wanted, least, tiles.entries, **shape.constants,
            **reached, SPLITS_PAD=padded, EARLY=early, num_warps=4, num_stages=1, **launch_options(early),
        )  # fmt: skip
    return out


def rotated_decode(
    qkv: Tensor, qk_norm: Tensor | None, eps: float, angles: Tensor, slots: Tensor, cache: Tensor, layer: int,
    page_table: Tensor, scales: Tensor | None, rows: Tensor, kv_lens: Tensor, scale: float, reach: int, size: int,
    softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """rope_and_write of qkv [B, Q + 2K, D], then decode_attention, in one launch; qkv stays as it is."""
    q = qkv[:, : qkv.shape[1] - 2 * cache.shape[4]]
    unturned = Unturned(Rotation(qk_norm, eps, angles), slots)
    attend = (scale, reach, size, softcap, sinks)
    return decode_attention(q, cache, layer, page_table, scales, rows, kv_lens, *attend, unturned=unturned)


def prefill_attention(
    q: Tensor, cache: Tensor, layer: int, page_table: Tensor, scales: Tensor | None, rows: Tensor, starts: Tensor,
    kv_lens: Tensor, spans: Tensor | None, scale: float, reach: int, size: int, softcap: float, sinks: Tensor | None,
    max_query: int, *,
    tiles: AttentionTiles | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """See attention.prefill_attention. `tiles` and `splits` are for measuring."""
    shape = AttentionShape.of(q, cache, scales)
    group, tokens, chunks = shape.heads // shape.kv_heads, q.shape[0], rows.shape[0]
    tiles = tiles or choose_tiles(PromptAttention(shape.head_dim, q.element_size(), group, max_query), arch(q.device))
    blocks = -(-tokens // (queries := tiles.rows // group))
    if splits is None:
        longest = most_read(page_table.shape[1] * shape.page_size, reach, size)
        splits = chunk_split_count(max(blocks, chunks), shape.kv_heads, longest, arch(q.device).processors)
    out = torch.empty((tokens, shape.heads * shape.head_dim), dtype=q.dtype, device=q.device)
    partial, logs = split_space(q, splits) if splits > 1 else (out, out)
    prefill_kernel[shape.kv_heads, blocks + chunks + 1, splits](
        q, cache, page_table, scales, rows, starts, kv_lens, spans, out, partial, logs, q.stride(0), cache.stride(0),
        page_table.stride(0), layer, tokens, chunks, score_factor(scale, softcap), sinks, **shape.constants,
        PAGE=shape.page_size, BLOCK_M=tiles.rows, BLOCK_Q=queries, BLOCK_N=tiles.entries, SPLIT=splits > 1,
        REACH=int(reach), SIZE=size, CAP=softcap, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        combine_chunks_kernel[shape.kv_heads, tokens](
            out, partial, logs, sinks, splits, GROUP=group, D=shape.head_dim, SPLITS_PAD=MOST_CHUNK_SPLITS, num_warps=1,
            num_stages=1,
        )  # fmt: skip
    return out


triton_decode_attention = operator(decode_attention)
triton_prefill_attention = operator(prefill_attention)
