"""Paged attention in Triton whose results do not depend on batch or chunks, to the bit. Reference: attention.py.

A query at position p gives the same bits as a decode row and in any chunk, since p fixes the order of its sums. Tiles
of queries begin at multiples of the tile in the sequence, as do tiles of keys. Keys are cut into at most MOST_SEGMENTS
segments, whose size follows from p; a segment's sums begin at zero, and segments are folded in ascending order. With
few decode rows several programs share the segments of a row and a second launch folds; else one program does both. The
kernel is one binary for decode and prefill.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.attend_triton import attend, borders, chunk_of, no_sums, ranges, score_factor
from gapless.kernels.attention_triton import TABLES, AttentionShape
from gapless.kernels.kinds import Reach
from gapless.kernels.kv_triton import computable, head_of, key_scaled, value_columns, value_scaled
from gapless.kernels.library_triton import arch, operator
from gapless.kernels.splits_triton import CAUSAL, GRID_PER_SM, first_entry, most_read, with_sink
from gapless.kernels.tiles import AttentionTiles, InvariantAttention, choose_tiles
from gapless.kernels.views import KV, Attend, RowBatch

LEAST_IN_SEGMENT = 128
"""Entries of a segment in a short row: a longer row has twice, four times, ... as many."""
MOST_SEGMENTS = 16
"""Segments of a row."""


@triton.jit
def _segment(position, LEAST: tl.constexpr, MOST: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr):
    """Entries of a segment, for the tile of queries that begins at `position`."""
    size = LEAST
    whole = MOST
    if REACH != CAUSAL:
        # A window or chunk may begin inside a segment.
        position = tl.minimum(position, SIZE)
        whole = MOST - 1
    while size * whole <= position:
        size *= 2
    return size


@triton.jit
def _weights(top, other, EMPTY: tl.constexpr):
    """Return the largest score of two parts, and the factors for the sums of either. EMPTY: both may have none."""
    both = tl.maximum(top, other)
    base = tl.where(both == float("-inf"), 0.0, both) if EMPTY else both
    return both, tl.exp2(top - base), tl.exp2(other - base)


@triton.jit
def _store_segment(partial, sums, acc, total, top, lane, real, offs_d, D: tl.constexpr):
    """Stores a segment's sums acc [M, D_PAD] of columns `offs_d`, total and top [M] for its `real` heads, at the lines
    `lane` [M]."""
    tl.store(sums + lane * 2, top, mask=real)
    tl.store(sums + lane * 2 + 1, total, mask=real)
    mine = real[:, None] & (offs_d < D)[None, :]
    tl.store(partial + (lane[:, None] * D + offs_d[None, :]), acc, mask=mine)


@triton.jit(do_not_specialize=["layer", "tokens", "chunks", "single", "most"], do_not_specialize_on_alignment=TABLES)
def attention_kernel(
    q, cache, table, scales, rows, starts, lens, spans, out, partial, sums, q_stride, page_stride, table_stride, layer,
    tokens, chunks, single, most, factor, sinks, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (KV head, block, share): BLOCK_Q queries of one chunk times the GROUP heads of a KV head.

    `single`: chunk c is token c, and block c is its tile. Else two spare blocks for each chunk (see `chunk_of`) leave
    room for all of them at any start of a chunk; the padding after the last chunk counts as one more chunk, with zeros
    as its result. Each share takes an equal part of a tile's segments; if there are several, the sums of each segment
    go to partial [tokens, heads, most, D] and sums [tokens, heads, most, 2] in float32.
    """
    D_PAD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16  # the least that tl.dot takes
    head, block = tl.program_id(0), tl.program_id(1)
    if single != 0:
        chunk, begin, end, tile = block, block, block + 1, block * 0
    else:
        # Later tiles of a chunk see more keys: they begin first, so that short ones end last.
        block = tl.num_programs(1) - 1 - block
        chunk = chunk_of(starts, chunks, block, BLOCK_Q, 2)
        begin = tl.load(starts + chunk).to(tl.int32)
        end = tl.load(starts + chunk + 1, mask=chunk < chunks, other=tokens).to(tl.int32)
        tile = block - begin // BLOCK_Q - 2 * chunk
    length = tl.load(lens + chunk, mask=chunk < chunks, other=0).to(tl.int32)
    # An inert row has one entry, read by all its queries.
    start = tl.maximum(length - (end - begin), 0)
    first = (start // BLOCK_Q + tile) * BLOCK_Q
    stop = start + (end - begin)
    if first >= stop:
        return
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = value_columns(cache, D, D_PAD)
    position = first + offs_m // GROUP
    real = (offs_m < BLOCK_Q * GROUP) & (position >= start) & (position < stop)
    mine = real[:, None] & (offs_d < D)[None, :]
    token = (begin + position - start).to(tl.int64)
    query = head * GROUP + offs_m % GROUP
    one = token * (HEADS * GROUP) + query
    whole, folded, highest = no_sums(BLOCK_M, D_PAD)
    if length == 0:
        tl.store(out + one[:, None] * D + offs_d[None, :], whole.to(out.dtype.element_ty), mask=mine)
        return
    factor = key_scaled(factor, scales, layer)
    straight = tl.arange(0, D_PAD)[None, :]
    line = q + token[:, None] * q_stride + query[:, None] * D + straight
    tile_q = computable(tl.load(line, mask=real[:, None] & (straight < D), other=0.0))
    keys, values, pairs = head_of(cache, layer, head, HEADS, D, PAGE)
    pages = table + tl.load(rows + chunk) * table_stride
    reach = tl.minimum(first + BLOCK_Q, length)
    # BLOCK_Q divides BLOCK_N: every query of the tile reads a part of the last tile of keys, and all tiles before.
    size = _segment(first, LEAST, MOST, REACH, SIZE)
    EDGE: tl.constexpr = REACH != CAUSAL or spans is not None
    since, last = ranges(spans, token, position, real, length, REACH, SIZE)
    floor, _, _, reach = borders(
        spans, since, last, real, tl.maximum(first, start), reach, BLOCK_N, REACH, SIZE
    )  # fmt: skip
    skipped = floor // size
    segments = tl.cdiv(reach, size) - skipped
    shares = tl.num_programs(2)
    each = tl.cdiv(segments, shares)
    share = tl.program_id(2) * each
    for segment in range(share, tl.minimum(share + each, segments)):
        low = (skipped + segment) * size
        high = tl.minimum(low + size, reach)
        if EDGE:
            low = tl.maximum(low, floor)
        acc, total, top = no_sums(BLOCK_M, D_PAD)
        acc, total, top = attend(
            acc, total, top, tile_q, keys, values, pairs, pages, since, last, factor, low, high, page_stride, HEADS * D,
            D, PAGE, BLOCK_N, True, True, EDGE, CAP,
        )  # fmt: skip
        acc = value_scaled(acc, cache, scales, layer)
        if shares > 1:
            # Only decode rows have several, so their one token is `begin`: small offsets take few registers.
            at = (begin.to(tl.int64) * HEADS + head) * GROUP * most + segment
            _store_segment(partial + at * D, sums + at * 2, acc, total, top, offs_m % GROUP * most, real, offs_d, D)
        else:
            # Fused by hand, as `combine_kernel` does: a compiler may fuse either product.
            highest, before, after = _weights(highest, top, EDGE)
            whole = tl.fma(whole, tl.broadcast_to(before[:, None], [BLOCK_M, D_PAD]), acc * after[:, None])
            folded = tl.fma(folded, before, total * after)
    if shares == 1:
        folded = with_sink(folded, highest, sinks, query)
        tl.store(
            out + one[:, None] * D + offs_d[None, :], (whole / folded[:, None]).to(out.dtype.element_ty), mask=mine
        )


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=TABLES)
def combine_kernel(
    lens, out, partial, sums, sinks, most, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (query head, row): the result of a decode row from its segments, folded in their order."""
    D_PAD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16  # the least that tl.dot takes
    row = tl.program_id(1)
    length = tl.load(lens + row).to(tl.int32)
    if length == 0:
        return
    size = _segment((length - 1) // BLOCK_Q * BLOCK_Q, LEAST, MOST, REACH, SIZE)
    skipped = first_entry(length - 1, REACH, SIZE) // size
    one = (row.to(tl.int64) * HEADS + tl.program_id(0)) * most
    offs_d = tl.arange(0, D_PAD)
    whole = tl.zeros([D_PAD], tl.float32)
    folded = tl.zeros([D_PAD], tl.float32)
    highest = tl.full([D_PAD], float("-inf"), tl.float32)
    for segment in range(0, tl.cdiv(length, size) - skipped):
        at = one + segment
        acc = tl.load(partial + at * D + offs_d, mask=offs_d < D, other=0.0)
        highest, before, after = _weights(highest, tl.load(sums + at * 2), False)
        whole = tl.fma(whole, before, acc * after)
        folded = tl.fma(folded, before, tl.load(sums + at * 2 + 1) * after)
    folded = with_sink(folded, highest, sinks, tl.program_id(0) + offs_d * 0)
    place = out + (row.to(tl.int64) * HEADS + tl.program_id(0)) * D + offs_d
    tl.store(place, (whole / folded).to(out.dtype.element_ty), mask=offs_d < D)


def queries_of(tiles: AttentionTiles, group: int) -> int:
    """Queries of a tile: a power of two, so that every border of keys is one of queries too."""
    return min(1 << (tiles.rows // group).bit_length() - 1, tiles.entries)


def shares_for(batch: int, kv_heads: int, longest: int, processors: int) -> int:
    """Return the most programs of a decode row, from the host's bounds: constant for a captured launch."""
    return max(1, min(MOST_SEGMENTS, -(-longest // LEAST_IN_SEGMENT), GRID_PER_SM * processors // (batch * kv_heads)))


def _launch(q: Tensor, kv: KV, batch: RowBatch, attention: Attend, shares: int, tiles: AttentionTiles | None) -> Tensor:
    """Compute attention of chunks, or of single tokens if there are no starts."""
    (cache, layer, page_table, scales), (rows, kv_lens, starts, spans) = kv, batch
    scale, reach, size, softcap, sinks = attention
    shape = AttentionShape.of(q, cache, scales)
    group, tokens, chunks = shape.heads // shape.kv_heads, q.shape[0], rows.shape[0]
    tiles = tiles or choose_tiles(InvariantAttention(shape.head_dim, q.element_size(), group), arch(q.device))
    block = queries_of(tiles, group)
    out = torch.empty((tokens, shape.heads * shape.head_dim), dtype=q.dtype, device=q.device)
    most = min(MOST_SEGMENTS, triton.cdiv(page_table.shape[1] * shape.page_size, LEAST_IN_SEGMENT))
    # They are empty if one program folds: a tensor of another dtype would be another kernel.
    parts = most if shares > 1 else 0
    partial = torch.empty((tokens, shape.heads, parts, shape.head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((tokens, shape.heads, parts, 2), dtype=torch.float32, device=q.device)
    blocks = tokens if starts is None else tokens // block + 2 * (chunks + 1)
    fixed = {"BLOCK_Q": block, "LEAST": LEAST_IN_SEGMENT, "MOST": MOST_SEGMENTS, "REACH": int(reach), "SIZE": size}
    attention_kernel[shape.kv_heads, blocks, shares](
        q, cache, page_table, scales, rows, rows if starts is None else starts, kv_lens, spans, out, partial, sums,
        q.stride(0), cache.stride(0), page_table.stride(0), layer, tokens, chunks, int(starts is None), most,
        score_factor(scale, softcap), sinks, **shape.constants, **fixed, CAP=softcap, PAGE=shape.page_size,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.entries, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if shares > 1:
        combine_kernel[shape.heads, tokens](
            kv_lens, out, partial, sums, sinks, most, shape.heads, shape.head_dim, **fixed, num_warps=4, num_stages=1
        )
    return out


def invariant_decode(
    q: Tensor, cache: Tensor, layer: int, page_table: Tensor, scales: Tensor | None, rows: Tensor, kv_lens: Tensor,
    scale: float, reach: int = 0, size: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, *,
    shares: int | None = None, tiles: AttentionTiles | None = None,
) -> Tensor:  # fmt: skip
    """See attention.decode_attention. Parameters after `scale` are for tests and measuring; `shares` change no bit."""
    longest = most_read(page_table.shape[1] * cache.shape[3], reach, size)
    shares = shares or shares_for(q.shape[0], cache.shape[4], longest, arch(q.device).processors)
    attention = Attend(scale, Reach(reach), size, softcap, sinks)
    return _launch(q, KV(cache, layer, page_table, scales), RowBatch(rows, kv_lens), attention, shares, tiles)


def invariant_prefill(
    q: Tensor, cache: Tensor, layer: int, page_table: Tensor, scales: Tensor | None, rows: Tensor, starts: Tensor,
    kv_lens: Tensor, spans: Tensor | None, scale: float, reach: int, size: int, softcap: float, sinks: Tensor | None,
    max_query: int, *, tiles: AttentionTiles | None = None,
) -> Tensor:  # fmt: skip
    """See attention.prefill_attention."""
    attention = Attend(scale, Reach(reach), size, softcap, sinks)
    return _launch(q, KV(cache, layer, page_table, scales), RowBatch(rows, kv_lens, starts, spans), attention, 1, tiles)


triton_invariant_decode = operator(invariant_decode)
triton_invariant_prefill = operator(invariant_prefill)
