"""Paged attention in plain torch: what a CPU without compiled kernels runs, and the reference of all others.

The cache is [pages, layers, 2, page_size, kv_heads, head_dim], keys before values. Position i of the sequence in row r
of the page table is in page `page_table[r, i // page_size]` at offset `i % page_size`. Seen as rows of [kv_heads *
head_dim], entry (page, layer, kind, offset) is row ((page * layers + layer) * 2 + kind) * page_size + offset.

Keys and values are gathered by whole pages, so the width of the page table bounds every row: pass the part that covers
the longest one. Lengths are read from tensors and never by the host. Entries that a row does not read may hold
anything, NaN included, without effect.
"""

from __future__ import annotations

from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gapless.kernels.kinds import Reach
from gapless.kernels.kv import read
from gapless.kernels.views import KV, Attend, RowBatch

GATHER_ELEMENTS = 1 << 26
"""Elements of the keys gathered at once, and of the scores of a tile; larger batches go in groups of rows."""
QUERY_TILE = 512
"""Queries of a chunk per attention call: bounds the mask, and skips keys outside the tile's reach."""

Position = TypeVar("Position", int, Tensor)


class Reads(NamedTuple):
    """The entries that each query reads: from `first`, None for 0, to before `end`."""

    first: Tensor | None
    end: Tensor

    @classmethod
    def of(cls, attend: Attend, position: Tensor, spans: Tensor | None = None, written: Tensor | int = 0) -> Self:
        """Return what queries at these positions read, and their spans as far as their row is written."""
        first = None if attend.reach == Reach.CAUSAL else _first(attend, position).clamp(min=0)
        if spans is None:
            return cls(first, position + 1)
        end = torch.maximum(position + 1, spans[:, 1].clamp(max=written))
        return cls(None if first is None else torch.minimum(first, spans[:, 0]), end)

    def part(self, part: slice) -> Self:
        return self._replace(first=None if self.first is None else self.first[part], end=self.end[part])

    def among(self, position: Tensor) -> Tensor:
        """Return whether each query reads the entries at `position`: [N] for all queries, or [T, N] by query."""
        before = position < self.end[:, None]
        return before if self.first is None else before & (position >= self.first[:, None])


def decode_attention(q: Tensor, kv: KV, batch: RowBatch, attend: Attend) -> Tensor:
    """See `seam.Kernels.decode_attention`. A row of length 0 gives zeros."""
    return _attend_rows(q, kv, batch.rows, Reads.of(attend, batch.kv_lens - 1), attend, attend.reach and attend.size)


def prefill_attention(q: Tensor, kv: KV, batch: RowBatch, attend: Attend, max_query: int) -> Tensor:
    """See `seam.Kernels.prefill_attention`: the reference, which gathers keys and values of each query alone. Padding
    gives zeros."""
    rows, kv_lens, starts, spans = batch
    assert starts is not None
    token = torch.arange(q.shape[0], device=q.device)
    chunk = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    real, chunk = chunk < len(rows), chunk.clamp(max=len(rows) - 1)
    position = kv_lens[chunk] - starts[chunk + 1] + token
    reads = Reads.of(attend, position.where(real, -1), spans, kv_lens[chunk].where(real, 0))
    return _attend_rows(q, kv, rows[chunk], reads, attend, 0)


def chunk_attention(q: Tensor, kv: KV, batch: RowBatch, attend: Attend, start: int) -> Tensor:
    """See `seam.Kernels.chunk_attention`. Keys and values are gathered once."""
    (count, heads, _), (page_size, kv_heads), spans = q.shape, kv.cache.shape[3:5], batch.spans
    end, first = start + count, 0 if spans is not None else max(0, _first(attend, start))
    pages = slice(first // page_size, -(-end // page_size))
    entries = _entries(kv, kv.page_table[:, pages].index_select(0, batch.rows))[0]
    entries = entries[first - pages.start * page_size :][: end - first]
    columns = torch.arange(end, device=q.device)
    reads = Reads.of(attend, columns[start:], spans, end)
    if spans is not None and reads.first is not None:  # what no query reads may hold anything
        entries = torch.where(columns < reads.first.min(), entries[-1], entries)
    k, v = (x.transpose(0, 1) for x in _gather(kv, entries))
    if start == 0 and spans is None and attend == Attend(attend.scale) and k.dtype == q.dtype:
        q, k, v = q.transpose(0, 1)[None], k[None], v[None]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=attend.scale, enable_gqa=heads > kv_heads)
        return out[0].transpose(0, 1).reshape(count, -1)
    # Heads of one group are a batch over the same keys, so that the mask is shared.
    q = q.view(count, kv_heads, -1, q.shape[2]).permute(2, 1, 0, 3)
    sinks = None if attend.sinks is None else attend.sinks.view(kv_heads, -1, 1, 1).transpose(0, 1)
    tile, parts = max(1, min(QUERY_TILE, GATHER_ELEMENTS // (heads * (end - first)))), []
    for low in range(0, count, tile):
        part = slice(low, min(low + tile, count))
        least, most = (0, end) if spans is not None else (max(0, _first(attend, start + low)), start + part.stop)
        mask = reads.part(part).among(columns[least:most])
        read = slice(least - first, most - first)
        keys, values = (x[:, read].expand(len(q), -1, -1, -1) for x in (k, v))
        out = weigh(q[:, :, part], keys, values, mask, attend._replace(sinks=sinks))
        parts.append(out.permute(2, 1, 0, 3).reshape(part.stop - low, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _first(attend: Attend, position: Position) -> Position:
    """Return the first entry that a query reads without its span. One below 0 stands for 0."""
    if attend.reach == Reach.WINDOW:
        return position - attend.size + 1
    return position - position % attend.size if attend.reach == Reach.CHUNK else position * 0


def _attend_rows(q: Tensor, kv: KV, rows: Tensor, reads: Reads, attend: Attend, most: int) -> Tensor:
    """Attend one query a row, which reads at most `most` entries; 0 for all that the page table covers."""
    (width, page_size), elements = (kv.page_table.shape[1], kv.cache.shape[3]), kv.cache.shape[3:].numel()
    pages = min(width, -(-(most - 1) // page_size) + 1) if most else width
    step = max(1, GATHER_ELEMENTS // (pages * elements))
    parts = []
    for low in range(0, q.shape[0], step):
        part = slice(low, low + step)
        parts.append(_attend_group(q[part], kv, rows[part], reads.part(part), attend, pages))
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else q.flatten(1)


def _attend_group(q: Tensor, kv: KV, rows: Tensor, reads: Reads, attend: Attend, pages: int) -> Tensor:
    """Treat heads that share a KV head as its queries, so that no key is repeated."""
    count, (page_size, kv_heads) = len(q), kv.cache.shape[3:5]
    table, position = kv.page_table.index_select(0, rows), torch.arange(pages * page_size, device=q.device)
    first = None if reads.first is None else reads.first[:, None]
    if first is not None and pages < table.shape[1]:
        page = first // page_size
        table = table.gather(1, (page + position[:pages]).clamp(max=table.shape[1] - 1))
        position, first = position + page * page_size, first % page_size
    entries, mask = _entries(kv, table), reads.among(position)
    own = entries[:, :1] if first is None else entries.gather(1, first)
    # A masked entry still takes part as 0 * value, and a reused page may hold NaN. So it reads the first entry that the
    # row reads: always written, and if that is NaN the row is lost anyway, but no other row with it.
    index = torch.where(mask, entries, own).flatten()
    k, v = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in _gather(kv, index))
    sinks = None if attend.sinks is None else attend.sinks.view(kv_heads, -1, 1)
    out = weigh(q.view(count, kv_heads, -1, q.shape[2]), k, v, mask[:, None, None], attend._replace(sinks=sinks))
    return out.reshape(count, -1).masked_fill_(reads.end[:, None] <= 0, 0)


def weigh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, attend: Attend) -> Tensor:
    """Softmax of q [.., T, D] over k and v [.., N, D] at `mask` [.., T, N]; sinks [.., 1] for the scores."""
    if k.dtype != q.dtype:
        return weigh(q.to(k.dtype), k, v, mask, attend).to(q.dtype)
    if attend.sinks is None and not attend.softcap:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=attend.scale)
    scores = q.float() @ k.float().mT * attend.scale
    if attend.softcap:
        scores = attend.softcap * torch.tanh(scores / attend.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if attend.sinks is not None:
        scores = torch.cat((scores, attend.sinks.expand(*scores.shape[:-1], 1)), -1)
    return (scores.softmax(-1)[..., : k.shape[-2]] @ v.float()).to(q.dtype)


def _gather(kv: KV, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [N, K, D] of a layer at `index` [N] of `_entries`: float32 if they are scaled."""
    _, layers, kinds, page_size, kv_heads, width = kv.cache.shape
    if kv.scales is not None:
        page = layers * kinds * page_size
        return read(kv, index // page, index % page)
    flat, first = kv.cache.view(-1, kv_heads, width), 2 * kv.layer * page_size
    return flat[first:].index_select(0, index), flat[first + page_size :].index_select(0, index)


def _entries(kv: KV, pages: Tensor) -> Tensor:
    """Return the rows of all entries of pages: [R, N] -> int64 [R, N * page_size]."""
    _, layers, kinds, page_size = kv.cache.shape[:4]
    offsets = torch.arange(page_size, device=pages.device)
    return (pages[:, :, None].long() * (layers * kinds * page_size) + offsets).flatten(1)
