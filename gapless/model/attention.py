"""The attention of a step: planned on the host from bounds, computed by kernels that read tables on the device.

`plan_attention` runs on the host and sees integers. `PagedAttention` lives for one forward. Nothing here reads a device
value on the host, and every shape follows from the plan.

All KV of a step's tokens is in the cache before any row of it attends, layer by layer: `rope_and_write` covers the
whole batch, and kernels read keys and values from the cache after it. So a row may read pages that another row of the
same step writes, in whatever order they stand in the batch; the planner relies on it. The fused operation for few rows
writes and reads row by row: it runs decode rows alone, and these share no page that an earlier step has not filled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.seam import Kernels
from gapless.kernels.views import KV, Attend, RowBatch
from gapless.model.seam import BatchShape, KVCache, StepInputs


class ChunkPlan(NamedTuple):
    """A prefill chunk: `size` queries at `offset` in the batch, positions from `start`, of batch row `row`."""

    row: int
    offset: int
    start: int
    size: int


class AttentionPlan(NamedTuple):
    """Host decisions for one batch: `decode` rows of at most `bound` KV entries, then chunks."""

    decode: int
    bound: int
    chunks: tuple[ChunkPlan, ...]


def plan_attention(shape: BatchShape) -> AttentionPlan:
    chunks, offset = [], shape.decode
    for i, (start, count) in enumerate(shape.chunks):
        chunks.append(ChunkPlan(shape.decode + i, offset, start, count))
        offset += count
    return AttentionPlan(shape.decode, shape.bound, tuple(chunks))


class PagedAttention:
    """Attention of one step over `cache`."""

    def __init__(self, kernels: Kernels, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> None:
        count, table = plan.decode, inputs.page_table
        self.kernels, self.plan, self.cache, self.pages = kernels, plan, cache, table
        self.table = table[:, : -(-plan.bound // cache.page_size)] if kernels.bounded else table
        self.longest = max((chunk.size for chunk in plan.chunks), default=0)
        self.rows = RowBatch(inputs.rows[:count], inputs.kv_lens[:count])
        if inputs.starts is not None:
            self.chunks = RowBatch(inputs.rows[count:], inputs.kv_lens[count:], inputs.starts[count:] - count)

    def forward(self, q: Tensor, layer: int, attend: Attend) -> Tensor:
        """Attend in one layer with q [T, heads, head_dim], whose keys and values are in the cache already.

        Returns [T, heads * head_dim].
        """
        count, kv, kernels = self.plan.decode, KV(self.cache.data, layer, self.table, self.cache.scales), self.kernels
        if not self.longest:
            return kernels.decode_attention(q, kv, self.rows, attend)
        chunks = self._chunks(q[count:], kv._replace(page_table=self.pages), attend)
        return kernels.join(kernels.decode_attention(q[:count], kv, self.rows, attend), chunks) if count else chunks

    def _chunks(self, q: Tensor, kv: KV, attend: Attend) -> Tensor:
        alone, count = self.kernels.chunk_attention, self.plan.decode
        if alone is None:
            return self.kernels.prefill_attention(q, kv, self.chunks, attend, self.longest)
        parts = []
        for row, offset, start, size in self.plan.chunks:
            batch = RowBatch(*(x[row - count : row - count + 1] for x in self.chunks[:2]))
            parts.append(alone(q[offset - count :][:size], kv, batch, attend, start))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
