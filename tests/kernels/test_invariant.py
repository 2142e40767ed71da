"""Rows that must not depend on their batch, to the bit: product and attention in Triton."""

from __future__ import annotations

import itertools

import pytest
import torch
from attend_cases import CHUNK, WINDOW, Kind
from implementations import BF16, F32, TRITON, runs
from paged import LAYER, Heads, Paged, chunked, dense, paged, queries
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from gapless.kernels import invariant_attention_triton as attention
from gapless.kernels import invariant_linear_triton as linear
from gapless.kernels.few_rows_triton import MOST_SPLIT_BLOCKS
from gapless.kernels.library_triton import counters
from gapless.kernels.tiles import AttentionTiles, InvariantProduct, ProductTiles, choose_tiles
from gapless.kernels.views import Attend

SMALL, QWEN = AttentionTiles(16, 16, 4, 2), Heads(16, 8, 128)
pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
CAUSAL = Kind()
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def operands(device: str, dtype: torch.dtype, rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias; a result is about one in size."""
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=random) for shape in ((rows, depth), (columns, depth), (columns,)))
    return tuple(y.to(dtype).to(device) for y in (x, weight * depth**-0.5, bias))


def check_product(
    device: str, dtype: torch.dtype, columns: int, depth: int, batches: list[int], biased: bool = True,
    tiles: list[ProductTiles | None] | None = None,
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
    q: Tensor, batch: Paged, sizes: list[int], ends: list[int], kind: Kind, tiles: AttentionTiles | None
) -> Tensor:
    """Chunks of these sizes that end at entry `ends` of their rows, chunk c in row c % rows."""
    starts, _, _ = chunked(sizes, ends)
    device, rows = q.device, batch.rows.repeat(-(-len(sizes) // len(batch.rows)))[: len(sizes)]
    places = (torch.tensor(numbers, device=device) for numbers in (starts, ends))
    start, kv_lens = places
    # Of the whole row: a chunk's queries read the span's entries that are written.
    spans = [span for size, end in zip(sizes, ends, strict=True) for span in kind.spans_of(end)[end - size :]]
    given = torch.tensor(spans, dtype=torch.int32, device=device) if kind.spans else None
    attend = kind.attend(Heads(q.shape[1], batch.cache.shape[4], q.shape[2]), device.type)
    return attention.invariant_prefill(
        q, batch.cache, LAYER, *batch[1:3], rows, start, kv_lens, given, *attend, max(sizes), tiles=tiles
    )


def check_attention(
    device: str, dtype: torch.dtype, heads: Heads, length: int, cuts: list[list[int]], alone: list[int],
    tiles: AttentionTiles | None = None, page_size: int = 16, kind: Kind = CAUSAL,
) -> None:  # fmt: skip
    """A row of `length` in one chunk, cut at every one of `cuts`, and the positions `alone` as decode rows."""
    batch = paged(heads, [length, 40, 1], dtype=dtype, device=device, page_size=page_size)
    q, attend = queries(heads, length, dtype=dtype, device=device), kind.attend(heads, device)
    first = batch._replace(rows=batch.rows[:1], kv_lens=batch.kv_lens[:1])
    whole = prefill(q, first, [length], [length], kind, tiles)
    some = sorted({*alone, 0, length - 1})
    want = dense(q[some], batch, [0] * len(some), [(kind.first(p), p + 1) for p in some], attend)
    assert (whole[some].double().cpu() - want).abs().max() < ROUNDING[dtype]
    for cut in cuts:
        borders = [0, *cut, length]
        parts = [
            # Beside other rows' chunks, before it and after it.
            prefill(
                torch.cat([q[:3], q[low:high], q[5:6]]),
                batch._replace(rows=batch.rows[[1, 0, 2]]),
                [3, high - low, 1],
                [30, high, 1],
                kind,
                tiles,
            )[3:-1]
            for low, high in itertools.pairwise(borders)
        ]
        assert torch.equal(torch.cat(parts), whole), cut
    rows, lens = batch.rows[:1].repeat(len(alone)), torch.tensor([p + 1 for p in alone], device=device)
    for shares in (1, 3):
        more = {"shares": shares, "tiles": tiles}
        args = (batch.cache, LAYER, *batch[1:3])
        got = attention.invariant_decode(q[alone], *args, rows, lens, *attend, **more)
        assert torch.equal(got, whole[alone]), shares
        last = attention.invariant_decode(q[alone[-1:]], *args, rows[-1:], lens[-1:], *attend, **more)
        assert torch.equal(last, whole[alone[-1:]]), shares


@runs(
    "columns, depth", on=TRITON, interpreter=[(40, 600), (130, 512), (7, 33), (64, 1024)], keep=1,
    cuda=[(4096, 1024), (1024, 3072), (6144, 1024), (1000, 333)],
)  # fmt: skip
def test_a_product_gives_a_row_the_same_bits_in_any_batch(implementation, columns, depth):
    large = [7, 17, 32, 64, 65, 128, 256, 257, 512, 1000, 2048] if implementation.name == "cuda" else [33, 70]
    for dtype in implementation.dtypes:
        check_product(implementation.device, dtype, columns, depth, [1, 2, 16, *large])
    if implementation.name == "interpreter":
        assert not counters(torch.device("cpu"), MOST_SPLIT_BLOCKS).any()


@runs("high", on=("interpreter",), interpreter=[32, 64], keep=1)
def test_one_program_or_several_give_the_same_bits(implementation, high, monkeypatch):
    """How high a block is, and who computes a segment, may follow the batch."""
    tiles = [ProductTiles(rows, 32, 16, 48, 4, 2) for rows in (16, high)]
    monkeypatch.setattr(linear, "choose_tiles", lambda *_: tiles[0])
    for few in (0, 1000):
        monkeypatch.setattr(linear, "FEW_BLOCKS", few)
        check_product("cpu", F32, 40, 100, [1, 65], tiles=tiles)


@runs(on=("cuda",))
def test_blocks_of_either_height_and_any_program_of_a_segment_give_the_same_bits(implementation, monkeypatch):
    gpu = linear.arch(torch.device("cuda"))
    tiles = [choose_tiles(InvariantProduct(rows, 1024, 3072, 2), gpu) for rows in (1, 2048)]
    assert tiles[0] != tiles[1]
    monkeypatch.setattr(linear, "choose_tiles", lambda *_: tiles[0])
    x, weight, _ = operands("cuda", BF16, 300, 1024, 3072)
    found = []
    for few in (0, 1 << 20):
        monkeypatch.setattr(linear, "FEW_BLOCKS", few)
        found += [linear.product(x, weight, None, tiles=how) for how in tiles]
    assert all(torch.equal(got, found[0]) for got in found[1:])


REAL_CUTS = [[1], [100, 612, 1124], [63, 64, 65, 127, 128, 2047], [2048, 2049, 2200]]
"""Around the tiles, and around position 2,048, where segments become longer"""


@runs(
    "heads, length, cuts, alone, page_size", on=TRITON, keep=2,
    interpreter=[
        (Heads(3, 1, 16), 136, [[1], [16, 17, 64, 130]], [0, 16, 127, 128], 16),
        (Heads(4, 2, 16), 60, [[7, 33]], [0, 31, 59], 5),
        (Heads(1, 1, 16), 136, [[1], [16, 17, 64, 130]], [0, 16, 127, 128], 16),
    ],
    cuda=[
        (heads, 2300, REAL_CUTS, [0, 1, 31, 63, 64, 127, 128, 300, 1000, 2047, 2048, 2049, 2299], 16)
        for heads in (QWEN, Heads(14, 2, 64), Heads(4, 4, 80))
    ],
)  # fmt: skip
def test_a_query_gets_the_same_bits_in_any_chunk(implementation, heads, length, cuts, alone, page_size):
    tiles, dtypes = (SMALL, (F32,)) if implementation.name == "interpreter" else (None, implementation.dtypes)
    for dtype in dtypes:
        check_attention(implementation.device, dtype, heads, length, cuts, alone, tiles, page_size)


KINDS = [
    Kind(WINDOW, 20, 3.0, True), Kind(CHUNK, 48, 3.0, True), Kind(WINDOW, 16), Kind(WINDOW, 1, sinks=True),
    Kind(CHUNK, 7), Kind(WINDOW, 90), Kind(softcap=2.0, sinks=True),
]  # fmt: skip


@runs("kind", KINDS, on=TRITON, keep=2)
def test_a_query_of_every_kind_gets_the_same_bits_in_any_chunk(implementation, kind, monkeypatch):
    """In segments of 16 entries up to a window of 47, of 32 up to 95."""
    if implementation.name == "interpreter":
        monkeypatch.setattr(attention, "LEAST_IN_SEGMENT", 16)
        monkeypatch.setattr(attention, "MOST_SEGMENTS", 4)
        cuts = [[1], [16, 17, 64, 130]]
        check_attention("cpu", F32, Heads(3, 1, 16), 136, cuts, [0, 16, 47, 48, 127, 128], SMALL, kind=kind)
        return
    for wide in (kind, kind._replace(size=kind.size * 40)):
        for dtype in implementation.dtypes:
            check_attention("cuda", dtype, QWEN, 2300, REAL_CUTS, [0, 63, 64, 1000, 2047, 2048, 2299], kind=wide)


@runs("dim", on=("interpreter",), interpreter=[80, 64, 128], keep=1)
def test_every_head_size_gives_the_same_bits_in_any_chunk(implementation, dim):
    for dtype in implementation.dtypes:
        check_attention("cpu", dtype, Heads(4, 2, dim), 70, [[33]], [2, 69], None)


@runs(on=("interpreter",))
def test_a_row_of_many_segments_gets_the_same_bits_in_any_chunk(implementation, monkeypatch):
    """Segments of 16 entries up to position 63, of 32 up to 127, of 64 beyond."""
    monkeypatch.setattr(attention, "LEAST_IN_SEGMENT", 16)
    monkeypatch.setattr(attention, "MOST_SEGMENTS", 4)
    cuts = [[63, 65, 127, 129]]
    check_attention("cpu", F32, Heads(2, 1, 16), 140, cuts, [0, 20, 63, 64, 127, 128, 139], SMALL)


@runs(on=("interpreter",))
def test_inert_chunks_and_padding_stay_finite(implementation):
    """A chunk of an inert row has one entry; tokens after the last chunk give zeros."""
    heads = Heads(2, 1, 16)
    batch, q = paged(heads, [40, 1, 30], dtype=F32), queries(heads, 60, dtype=F32)
    starts, kv_lens = torch.tensor([0, 20, 37, 40, 40]), torch.tensor([40, 1, 30, 1])
    rows = torch.cat([batch.rows, torch.zeros(1, dtype=torch.int64)])
    got = attention.invariant_prefill(
        q, batch.cache, LAYER, *batch[1:3], rows, starts, kv_lens, None, *Attend(0.3), 20, tiles=SMALL
    )
    assert got.isfinite().all() and not got[40:].any() and got[:40].any(1).sum() >= 23
    for shares in (1, 3):
        lens = torch.tensor([0, 1, 30])
        args = (batch.cache, LAYER, *batch[1:4], lens)
        out = attention.invariant_decode(q[:3], *args, 0.3, shares=shares, tiles=SMALL)
        assert not out[0].any() and out.isfinite().all()
