"""The paged attention seam with a plain torch backend: right on CPU and CUDA, in float32, bfloat16 and float16.

`plan_attention` runs on the host and sees integers. `PagedAttention` lives for one forward: it computes every index
and mask once from device tables, and each layer reuses them. Nothing here reads a device value on the host, and every
shape follows from the plan.

KV addresses: seen as rows of [kv_heads * head_dim], entry (page, layer, kind, offset) of the page-major cache is row
((page * layers + layer) * 2 + kind) * page_size + offset. The part (page, offset) is computed once a step; a layer
adds its own by starting the view later.

All KV of a step's tokens is in the cache before any row of it attends, layer by layer: `rope_and_write` covers the
whole batch, and every backend reads keys and values from the cache after it (a chunk from position 0 reads its own,
which are the same). So a row may read pages that another row of the same step writes, in whatever order they stand in
the batch; the planner relies on it. The fused operation for few rows writes and reads row by row: it runs decode rows
alone, and these share no page that an earlier step has not filled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gapless.kernels.seam import Kernels
from gapless.kernels.views import KV, Attend, RowBatch
from gapless.model.seam import BatchShape, KVCache, StepInputs

GATHER_ELEMENTS = 1 << 26
"""Elements of the keys gathered at once for decode rows; larger batches go in groups of rows."""
QUERY_TILE = 512
"""Queries of a continued chunk per attention call: bounds the mask and skips keys after the tile."""


class ChunkPlan(NamedTuple):
    """A prefill chunk: `size` queries at `offset` in the batch, positions from `start`, of batch row `row`."""

    row: int
    offset: int
    start: int
    size: int


class AttentionPlan(NamedTuple):
    """Host decisions for one batch. `groups` are ranges of decode rows that are gathered together."""

    bound: int
    groups: tuple[tuple[int, int], ...]
    chunks: tuple[ChunkPlan, ...]


class _Group(NamedTuple):
    """Decode rows low..high: cache rows to gather [rows * width], additive mask [rows, 1, G, width]."""

    low: int
    high: int
    entries: Tensor
    mask: Tensor


def plan_attention(shape: BatchShape, kv_width: int) -> AttentionPlan:
    """Plan a batch; `kv_width` is kv_heads * head_dim."""
    step = max(1, GATHER_ELEMENTS // max(1, shape.bound * kv_width))
    groups = tuple((low, min(low + step, shape.decode)) for low in range(0, shape.decode, step))
    chunks, offset = [], shape.decode
    for i, (start, count) in enumerate(shape.chunks):
        chunks.append(ChunkPlan(shape.decode + i, offset, start, count))
        offset += count
    return AttentionPlan(shape.bound, groups, tuple(chunks))


class FusedAttention:
    """Attention of one step by kernels that read pages and lengths on the device themselves."""

    def __init__(self, kernels: Kernels, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> None:
        assert kernels.decode_attention is not None and kernels.prefill_attention is not None
        self.decode, self.prefill, self.join = kernels.decode_attention, kernels.prefill_attention, kernels.join
        self.cache, self.table = cache.data, inputs.page_table
        self.longest = max((chunk.size for chunk in plan.chunks), default=0)
        self.count = count = sum(high - low for low, high in plan.groups)
        self.rows = RowBatch(inputs.rows[:count], inputs.kv_lens[:count])
        if inputs.starts is not None:
            self.chunks = RowBatch(inputs.rows[count:], inputs.kv_lens[count:], inputs.starts[count:] - count)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, attend: Attend) -> Tensor:
        """See `PagedAttention.forward`."""
        count, kv = self.count, KV(self.cache, layer, self.table)
        if not self.longest:
            return self.decode(q, kv, self.rows, attend)
        chunks = self.prefill(q[count:], kv, self.chunks, attend, self.longest)
        return self.join(self.decode(q[:count], kv, self.rows, attend), chunks) if count else chunks


class PagedAttention:
    """Attention of one step over `cache`, for `heads` query heads."""

    def __init__(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache, heads: int) -> None:
        _, layers, _, self.page_size, self.kv_heads, self.head_dim = cache.data.shape
        self.heads, self.grouped = heads, heads // self.kv_heads
        self.flat = cache.data.view(-1, self.kv_heads * self.head_dim)
        self.positions, self.pages, self.kv_lens = inputs.positions, inputs.pages, inputs.kv_lens
        self.page_rows = layers * 2 * self.page_size
        self.offsets = torch.arange(self.page_size, device=inputs.slots.device)
        self.decode = [self._group(low, high, plan.bound) for low, high in plan.groups]
        self.chunks = [(chunk, self._context(chunk)) for chunk in plan.chunks]
        longest = max((chunk.start + chunk.size for chunk in plan.chunks if chunk.start), default=0)
        self.columns = torch.arange(longest, device=inputs.slots.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, attend: Attend) -> Tensor:
        """Attend in one layer with q [T, heads, head_dim]; k and v [T, kv_heads, head_dim] are in the cache already.

        Returns [T, heads * head_dim].
        """
        keys = self.flat[2 * layer * self.page_size :]
        values = self.flat[(2 * layer + 1) * self.page_size :]
        parts = [self._decode(q, keys, values, group) for group in self.decode]
        for chunk, entries in self.chunks:
            if entries is None:
                parts.append(self._fresh(q, k, v, chunk))
            else:
                parts.extend(self._continued(q, keys, values, chunk, entries))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _entries(self, rows: Tensor, length: int) -> Tensor:
        """Cache rows of at least the first `length` positions, whole pages: page tables [R, W] -> [R, width]."""
        count = min(-(-length // self.page_size), rows.shape[1])
        return (rows[:, :count, None] * self.page_rows + self.offsets).flatten(1)

    def _group(self, low: int, high: int, bound: int) -> _Group:
        index = self._entries(self.pages[low:high], bound)
        readable = torch.arange(index.shape[1], device=index.device) < self.kv_lens[low:high, None]
        # A masked entry still takes part as 0 * value, and a reused page may hold NaN. So it reads the row's own
        # first entry: always written, and if that is NaN the row is lost anyway, but no other row with it.
        index = torch.where(readable, index, index[:, :1])
        mask = torch.zeros(index.shape, dtype=self.flat.dtype, device=index.device).masked_fill_(~readable, -torch.inf)
        return _Group(low, high, index.flatten(), mask[:, None, None].expand(-1, 1, self.grouped, -1))

    def _context(self, chunk: ChunkPlan) -> Tensor | None:
        """Cache rows [start + size] of a chunk's whole context; None when the chunk is its context."""
        end = chunk.start + chunk.size
        return self._entries(self.pages[chunk.row : chunk.row + 1], end)[0, :end] if chunk.start else None

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, group: _Group) -> Tensor:
        """Treat heads that share a KV head as its queries, so that no key is repeated."""
        rows = group.high - group.low
        shape = (rows, -1, self.kv_heads, self.head_dim)
        k = keys.index_select(0, group.entries).view(shape).transpose(1, 2)
        v = values.index_select(0, group.entries).view(shape).transpose(1, 2)
        q = q[group.low : group.high].view(rows, self.kv_heads, self.grouped, self.head_dim)
        return scaled_dot_product_attention(q, k, v, attn_mask=group.mask).reshape(rows, -1)

    def _fresh(self, q: Tensor, k: Tensor, v: Tensor, chunk: ChunkPlan) -> Tensor:
        """A chunk from position 0 needs nothing from the cache."""
        span = slice(chunk.offset, chunk.offset + chunk.size)
        q, k, v = (x[span].transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped > 1)
        return out[0].transpose(0, 1).reshape(chunk.size, -1)

    def _continued(self, q: Tensor, keys: Tensor, values: Tensor, chunk: ChunkPlan, index: Tensor) -> list[Tensor]:
        """A chunk after cached context: gathered once, attended in tiles of queries."""
        k, v = (x.index_select(0, index).view(-1, self.kv_heads, self.head_dim) for x in (keys, values))
        tiles = range(0, chunk.size, QUERY_TILE)
        return [self._tile(q, k, v, chunk, low, min(low + QUERY_TILE, chunk.size)) for low in tiles]

    def _tile(self, q: Tensor, k: Tensor, v: Tensor, chunk: ChunkPlan, low: int, high: int) -> Tensor:
        """Queries low..high of the chunk. Heads of one group are a batch over the same keys, so the mask is shared."""
        span, end = slice(chunk.offset + low, chunk.offset + high), chunk.start + high
        readable = self.columns[:end] <= self.positions[span, None]
        q = q[span].view(high - low, self.kv_heads, self.grouped, self.head_dim).permute(2, 1, 0, 3)
        k, v = (x[:end].transpose(0, 1).expand(self.grouped, -1, -1, -1) for x in (k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=readable)
        return out.permute(2, 1, 0, 3).reshape(high - low, -1)
