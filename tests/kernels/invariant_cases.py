"""Rows that must not depend on their batch, to the bit: cases of product and attention for interpreter and GPU."""

from __future__ import annotations

import itertools

import torch
from paged import LAYER, Heads, Paged, chunked, direct, paged, queries
from torch import Tensor

from gapless.kernels import invariant_attention_triton as attention
from gapless.kernels import invariant_linear_triton as linear
from gapless.kernels.attention_triton import AttentionTiles

ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def operands(device: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias; a result is about one in size."""
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=random) for shape in ((rows, depth), (columns, depth), (columns,)))
    return tuple(y.to(dtype).to(device) for y in (x, weight * depth**-0.5, bias))


def check_product(
    device: str, dtype: torch.dtype, columns: int, depth: int, batches: list[int], biased: bool = True,
    tiles: list[linear.ProductTiles | None] | None = None,
) -> None:  # fmt: skip
    """Every batch, and every one of `tiles`, gives the rows of the largest batch."""
    x, weight, bias = operands(device, dtype, max(batches), columns, depth)
    bias = bias if biased else None
    whole = linear.product(x, weight, bias)
    want = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), want, rtol=0, atol=ROUNDING[dtype])
    for how in tiles or [None]:
        for rows in batches:
            # The last rows, so that a row's place in its tile changes too.
            got = linear.product(x[-rows:].contiguous(), weight, bias, tiles=how)
            assert torch.equal(got, whole[-rows:]), (rows, how)


def prefill(
    q: Tensor, batch: Paged, sizes: list[int], ends: list[int], scale: float, tiles: AttentionTiles | None
) -> Tensor:
    """Chunks of these sizes that end at entry `ends` of their rows, chunk c in row c % rows."""
    starts, _, _ = chunked(sizes, ends)
    device, rows = q.device, batch.rows.repeat(-(-len(sizes) // len(batch.rows)))[: len(sizes)]
    places = (torch.tensor(numbers, device=device) for numbers in (starts, ends))
    start, kv_lens = places
    return attention.invariant_prefill(
        q, batch.cache, LAYER, batch.page_table, rows, start, kv_lens, scale, max(sizes), tiles=tiles
    )


def check_attention(
    device: str, dtype: torch.dtype, heads: Heads, length: int, cuts: list[list[int]], alone: list[int],
    tiles: AttentionTiles | None = None, page_size: int = 16,
) -> None:  # fmt: skip
    """A row of `length` in one chunk, cut at every one of `cuts`, and the positions `alone` as decode rows."""
    batch = paged(heads, [length, 40, 1], dtype=dtype, device=device, page_size=page_size)
    q, scale = queries(heads, length, dtype=dtype, device=device), heads.dim**-0.5
    first = Paged(batch.cache, batch.page_table, batch.rows[:1], batch.kv_lens[:1])
    whole = prefill(q, first, [length], [length], scale, tiles)
    some = sorted({*alone, 0, length - 1})
    want = direct(q[some], batch, [0] * len(some), [p + 1 for p in some], scale)
    assert (whole[some].double().cpu() - want).abs().max() < ROUNDING[dtype]
    for cut in cuts:
        borders = [0, *cut, length]
        parts = [
            # Beside other rows' chunks, before it and after it.
            prefill(
                torch.cat([q[:3], q[low:high], q[5:6]]),
                Paged(batch.cache, batch.page_table, batch.rows[[1, 0, 2]], batch.kv_lens),
                [3, high - low, 1],
                [30, high, 1],
                scale,
                tiles,
            )[3:-1]
            for low, high in itertools.pairwise(borders)
        ]
        assert torch.equal(torch.cat(parts), whole), cut
    rows, lens = batch.rows[:1].repeat(len(alone)), torch.tensor([p + 1 for p in alone], device=device)
    for shares in (1, 3):
        more = {"shares": shares, "tiles": tiles}
        args = (batch.cache, LAYER, batch.page_table)
        got = attention.invariant_decode(q[alone], *args, rows, lens, scale, **more)
        assert torch.equal(got, whole[alone]), shares
        last = attention.invariant_decode(q[alone[-1:]], *args, rows[-1:], lens[-1:], scale, **more)
        assert torch.equal(last, whole[alone[-1:]]), shares
