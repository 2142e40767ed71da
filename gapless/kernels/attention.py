"""Paged attention as a plain computation: the reference results of fused kernels, without regard to speed.

The cache is [pages, layers, 2, page_size, kv_heads, head_dim], keys before values. Position i of the sequence in row r
of the page table is in page `page_table[r, i // page_size]` at offset `i % page_size`. Lengths are read from tensors
and never by the host. Entries beyond a length may hold anything, NaN included, without effect.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels.views import KV, Attend, RowBatch

TOKENS_AT_ONCE = 64
"""Query tokens whose keys are gathered at once in `prefill_attention`."""


def decode_attention(q: Tensor, kv: KV, batch: RowBatch, attend: Attend) -> Tensor:
    """One query token a row: q [B, heads, head_dim] -> [B, heads * head_dim].

    Batch row b is row `batch.rows[b]` of the page table and reads its first `kv_lens[b]` entries; none gives zeros.
    Computed in float32, returned in q's dtype.
    """
    pages = kv.page_table[batch.rows].long()
    count, heads, head_dim = q.shape
    keys, values = (kv.cache[pages, kv.layer, kind].flatten(1, 2).float() for kind in (0, 1))
    kv_heads = keys.shape[2]
    readable = torch.arange(keys.shape[1], device=q.device) < batch.kv_lens[:, None]
    keys, values = (x.masked_fill(~readable[:, :, None, None], 0) for x in (keys, values))
    grouped = q.float().view(count, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bhgd,bnhd->bhgn", grouped, keys) * attend.scale
    weights = scores.masked_fill(~readable[:, None, None], -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("bhgn,bnhd->bhgd", weights, values).to(q.dtype).reshape(count, -1)


def prefill_attention(q: Tensor, kv: KV, batch: RowBatch, attend: Attend, max_query: int) -> Tensor:
    """Causal attention of C chunks whose own keys and values are in the cache. q [T, heads, head_dim] -> the same flat.

    Chunk c is the tokens starts[c] .. starts[c + 1] of q, the last of `kv_lens[c]` entries of its row. Chunks may be
    empty. Tokens from starts[C] on are padding and give zeros. `max_query` is an upper bound of the tokens of a chunk,
    for kernels to choose by.
    """
    rows, kv_lens, starts, _ = batch
    assert starts is not None
    token = torch.arange(q.shape[0], device=q.device)
    chunk = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    real, chunk = chunk < len(rows), chunk.clamp(max=len(rows) - 1)
    seen = (kv_lens[chunk] - starts[chunk + 1] + token + 1).where(real, 0)
    parts = [
        decode_attention(q[part], kv, RowBatch(rows[chunk[part]], seen[part]), attend)
        for part in (slice(at, at + TOKENS_AT_ONCE) for at in range(0, q.shape[0], TOKENS_AT_ONCE))
    ]
    return torch.cat(parts)
