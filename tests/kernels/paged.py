"""Paged batches for attention tests, and the answer computed directly: one token at a time, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.views import KV, Attend, Rotation, RowBatch

LAYERS, LAYER = 2, 1


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int


class Paged(NamedTuple):
    """A cache whose unwritten entries are NaN, and the rows in it. `rows` index the page table in no order."""

    cache: Tensor
    page_table: Tensor
    scales: Tensor | None
    rows: Tensor
    kv_lens: Tensor

    @property
    def kv(self) -> KV:
        """The layer that is filled."""
        return KV(self.cache, LAYER, self.page_table, self.scales)

    @property
    def batch(self) -> RowBatch:
        """All rows, one query token each."""
        return RowBatch(self.rows, self.kv_lens)


def paged(
    heads: Heads, lengths: list[int], *, page_size: int = 16, width: int | None = None, dtype: torch.dtype,
    device: str = "cpu", seed: int = 0,
) -> Paged:  # fmt: skip
    """One row a length, on pages in random order. Rows of length 1 lie on the null page 0, as padding rows do."""
    random = torch.Generator().manual_seed(seed)
    width = width or -(-max(lengths) // page_size)
    needed = [-(-n // page_size) if n > 1 else 0 for n in lengths]
    ids = (torch.randperm(sum(needed), generator=random) + 1).int()
    rows = torch.randperm(len(lengths) + 2, generator=random)[: len(lengths)]
    # Beyond a row's pages the table says anything that is a page.
    table = torch.randint(0, len(ids) + 1, (len(lengths) + 2, width), generator=random, dtype=torch.int32)
    cache = torch.full((len(ids) + 1, LAYERS, 2, page_size, heads.kv, heads.dim), torch.nan)
    cache[0, :, :, 0] = 0
    for row, length, pages in zip(rows.tolist(), lengths, ids.split(needed), strict=True):
        table[row, : max(1, len(pages))] = pages if len(pages) else 0
        if length > 1:
            entry = torch.arange(length)
            values = torch.randn((length, LAYERS, 2, heads.kv, heads.dim), generator=random)
            cache[pages[entry // page_size].long(), :, :, entry % page_size] = values
    lens = torch.tensor(lengths, device=device)
    return Paged(cache.to(dtype).to(device), table.to(device), None, rows.to(device), lens)


def queries(heads: Heads, tokens: int, *, dtype: torch.dtype, device: str = "cpu", seed: int = 1) -> Tensor:
    """[tokens, heads, dim], a view of a fused query, key and value as a model has it."""
    random = torch.Generator().manual_seed(seed)
    fused = torch.randn((tokens, heads.query + 2 * heads.kv, heads.dim), generator=random)
    return fused.to(dtype).to(device)[:, : heads.query]


def direct(q: Tensor, batch: Paged, chunk_of: list[int], seen: list[int], scale: float) -> Tensor:
    """Token t reads the first seen[t] entries of row chunk_of[t]. -> [T, heads * dim] float64 on the CPU."""
    return dense(q, batch, chunk_of, [(0, n) for n in seen], Attend(scale))


def dense(q: Tensor, batch: Paged, row_of: list[int], ranges: list[tuple[int, int]], attend: Attend) -> Tensor:
    """Softmax over what each token reads, written out: token t reads entries ranges[t] of row row_of[t]. Reach and size
    of `attend` are not looked at. -> [T, heads * dim] float64 on the CPU."""
    q, cache, table = q.double().cpu(), batch.cache.cpu(), batch.page_table.cpu().long()
    page_size, kv_heads = cache.shape[3:5]
    grouped = q.unflatten(1, (kv_heads, -1))
    sinks = None if attend.sinks is None else attend.sinks.double().cpu().view(kv_heads, -1, 1)
    out = torch.zeros(grouped.shape, dtype=torch.float64)
    for t, (row, (first, end)) in enumerate(zip(row_of, ranges, strict=True)):
        entry = torch.arange(first, end)
        page = table[batch.rows[row].item(), entry // page_size]
        k, v = cache[page, LAYER, :, entry % page_size].double().unbind(1)
        scores = torch.einsum("hgd,nhd->hgn", grouped[t], k) * attend.scale
        if attend.softcap:
            scores = attend.softcap * torch.tanh(scores / attend.softcap)
        weights = (scores if sinks is None else torch.cat((scores, sinks), -1)).softmax(-1)[..., : end - first]
        out[t] = torch.einsum("hgn,nhd->hgd", weights, v)
    return out.flatten(1)


def chunked(sizes: list[int], lengths: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Chunks of these sizes at the end of rows of these lengths: offsets; each token's chunk, and how much it sees."""
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    chunk_of = [c for c, size in enumerate(sizes) for _ in range(size)]
    seen = [n - size + i + 1 for size, n in zip(sizes, lengths, strict=True) for i in range(size)]
    return starts, chunk_of, seen


class Turn(NamedTuple):
    """Queries, keys and values of a batch whose rows' last entries are not in the cache yet, and how they get there."""

    qkv: Tensor
    rotation: Rotation
    slots: Tensor


def unturned(heads: Heads, batch: Paged, norm: bool) -> Turn:
    """Queries, keys and values, for rows of which one at most has length 1."""
    cache, device = batch.cache, batch.cache.device
    random, page_size = torch.Generator().manual_seed(2), cache.shape[3]
    total = heads.query + 2 * heads.kv
    qkv = torch.randn((len(batch.rows), total, heads.dim), generator=random)
    qk_norm = torch.randn((heads.query + heads.kv, heads.dim), generator=random) if norm else None
    position = batch.kv_lens - 1
    slots = batch.page_table[batch.rows, position // page_size].long() * page_size + position % page_size
    angle = torch.rand((len(batch.rows), heads.dim // 2), generator=random) * 6
    angles = torch.cat((angle.cos(), angle.sin()), dim=1).to(device)
    qk_norm = None if qk_norm is None else qk_norm.to(device)
    return Turn(qkv.to(cache.dtype).to(device), Rotation(qk_norm, 1e-6, angles), slots)
