"""Paged attention, against a direct computation in float64."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from implementations import BF16, F16, F32, runs
from native_kernels import check_threads, load_native, load_plain_variant
from paged import LAYER, Heads, Paged, chunked, direct, paged, queries
from torch import Tensor

from gapless.kernels import native, unpack
from gapless.kernels.views import Attend, Reach, RowBatch

LENGTHS = [1, 5, 16, 17, 64, 65, 130, 700, 1030]
"""Around the page, C++'s block of 64 keys and its split of 512"""
CHUNKS = [1, 5, 9, 17, 1, 33, 100, 200, 2]
"""This many of the last tokens of each length are a prefill chunk"""
LONG, LONG_CHUNKS = [1, 15, 16, 17, 255, 1000, 4097, 300], [1, 15, 3, 17, 129, 300, 5, 64]
"""On a GPU"""
LIMITS = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}
"""Those of 16 bits are results about four in size, rounded."""
HEADS = [
    Heads(2, 2, 64), Heads(16, 2, 64), Heads(7, 1, 128), Heads(4, 1, 80), Heads(3, 1, 16), Heads(4, 2, 20),
    Heads(1, 1, 256),
]  # fmt: skip
ON_GPU = [Heads(16, 8, 128), Heads(28, 4, 128), Heads(8, 2, 64), Heads(4, 4, 80), Heads(6, 2, 96), Heads(8, 1, 256)]


def near(found: Tensor, wanted: Tensor) -> None:
    assert found.isfinite().all()
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=LIMITS[found.dtype])


def check_decode(op, batch: Paged, q: Tensor) -> Tensor:
    scale, lengths = q.shape[2] ** -0.5, batch.kv_lens.tolist()
    got = op(q, batch.kv, batch.batch, Attend(scale))
    near(got, direct(q, batch, list(range(len(lengths))), lengths, scale))
    return got


def check_prefill(op, batch: Paged, sizes: list[int], q: Tensor) -> None:
    starts, chunk_of, seen = chunked(sizes, batch.kv_lens.tolist())
    scale, device = q.shape[2] ** -0.5, q.device
    chunks = batch.batch._replace(starts=torch.tensor(starts, device=device))
    got = op(q, batch.kv, chunks, Attend(scale), max(sizes))
    near(got[: starts[-1]], direct(q[: starts[-1]], batch, chunk_of, seen, scale))


@runs(
    "heads, page_size", cpu=[(heads, 16) for heads in HEADS], interpreter=[(Heads(4, 2, 80), 5), (Heads(7, 1, 64), 16)],
    cuda=[*((heads, 16) for heads in ON_GPU), *((ON_GPU[0], size) for size in (5, 8, 32, 128))], keep=3,
)  # fmt: skip
def test_attention_equals_the_direct_computation(implementation, heads, page_size):
    """Decode rows, each of which gives the same bits alone in C++; then whole prompts, chunks behind cached context,
    and single queries, with three tokens of no row."""
    lengths, sizes = {"cuda": (LONG, LONG_CHUNKS), "interpreter": ([1, 5, 33, 70], [1, 3, 33, 9])}.get(
        implementation.name, (LENGTHS, CHUNKS)
    )
    kernels, device = implementation.kernels, implementation.device
    for dtype in implementation.dtypes if implementation.name != "torch" else (F32,):
        batch = paged(heads, lengths, page_size=page_size, dtype=dtype, device=device)
        q = queries(heads, len(lengths), dtype=dtype, device=device)
        got = check_decode(kernels.decode_attention, batch, q)
        for i in (0, 4, 8) if implementation.name == "native" else ():
            one = RowBatch(batch.rows[i : i + 1], batch.kv_lens[i : i + 1])
            alone = kernels.decode_attention(q[i : i + 1], batch.kv, one, Attend(heads.dim**-0.5))
            assert torch.equal(alone[0], got[i])
        q = queries(heads, sum(sizes) + 3, dtype=dtype, device=device)
        check_prefill(kernels.prefill_attention, batch, sizes, q)


@pytest.mark.parametrize("dim", [1, 2, 7, 15, 17, 31, 33, 63, 100, 129, 250, 255, 257, 300])
def test_heads_of_any_size_equal_the_direct_computation_in_cpp(dim):
    kernels, heads, sizes = load_native(), Heads(3, 1, dim), [130, 3]
    for dtype in LIMITS:
        batch = paged(heads, [130, 70], dtype=dtype)
        check_prefill(kernels.prefill_attention, batch, sizes, queries(heads, sum(sizes), dtype=dtype))
        check_decode(kernels.decode_attention, batch, queries(heads, 2, dtype=dtype))


def check_null_row(op, dtype: torch.dtype) -> None:
    """An inert row: KV length 1 whatever its page table and its chunk say."""
    heads = Heads(4, 2, 64)
    batch = paged(heads, [40], dtype=dtype)
    batch.cache[0, LAYER, :, 0] = torch.randn(2, 2, 64).to(dtype)
    batch.page_table[0] = 0
    null = RowBatch(torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 5]))
    want = batch.cache[0, LAYER, 1, 0].repeat_interleave(2, 0).flatten()
    got = op(queries(heads, 5, dtype=dtype), batch.kv, null, Attend(0.125), 5)
    torch.testing.assert_close(got, want.expand(5, -1))


class Kind(NamedTuple):
    """A kind of attention, and spans of a prompt by their borders."""

    attend: Attend
    spans: tuple[tuple[int, int], ...] = ()

    def table(self, length: int) -> Tensor | None:
        """See `RowBatch.spans`."""
        at = torch.arange(length, dtype=torch.int32)
        found = torch.stack((at, at + 1), 1)
        for first, end in self.spans:
            found[first:end] = torch.tensor((first, end))
        return found if self.spans else None

    def read(self, length: int) -> Tensor:
        """Whether a query reads an entry, bool [queries, entries]."""
        (_, reach, size, _, _), at = self.attend, torch.arange(length)
        first = {Reach.CAUSAL: 0 * at, Reach.WINDOW: at - size + 1, Reach.CHUNK: at // max(size, 1) * size}[reach]
        end, spans = at + 1, self.table(length)
        if spans is not None:
            first, end = first.minimum(spans[:, 0]), end.maximum(spans[:, 1])
        return (at >= first[:, None]) & (at < end[:, None])


def kinds(heads: int) -> list[Kind]:
    """Reaches that begin inside a block of keys and in another one than they end in; spans longer than they are."""
    sinks = torch.linspace(-3, 9, heads)
    return [
        Kind(Attend(0.125)), Kind(Attend(0.125, Reach.WINDOW, 70, 2.0, sinks)),
        Kind(Attend(0.125, Reach.CHUNK, 48), ((20, 60), (100, 140))), Kind(Attend(0.125, Reach.WINDOW, 20)),
        Kind(Attend(0.125, Reach.CHUNK, 48, 0.0, sinks)), Kind(Attend(0.125), ((20, 60), (100, 140))),
        Kind(Attend(0.125, Reach.WINDOW, 1, 5.0)),
    ]  # fmt: skip


def wild_results(op, grouped: int, dtype: torch.dtype, kind: Kind) -> dict[tuple[float, int], tuple[Tensor, Tensor]]:
    """By the last dim of one value of 151, and its place: the result with it and without, [151, heads, dim].

    In two chunks: some queries of the second one read all of the prompt.
    """
    length, found, heads = 151, {}, Heads(grouped, 1, 64)
    made, q = paged(heads, [length], dtype=dtype), queries(heads, length, dtype=dtype)
    ends = torch.tensor([0, 90, length])
    batch = RowBatch(made.rows.repeat(2), ends[1:], ends, kind.table(length))
    clean = op(q, made.kv, batch, kind.attend, 90).view(length, grouped, 64)
    for wild, place in itertools.product((math.nan, math.inf, -math.inf), (0, 30, 61, 64, 89, 90, 128, 149, 150)):
        cache = made.cache.clone()
        cache[made.page_table[made.rows[0], place // 16], LAYER, 1, place % 16, :, -1] = wild
        found[wild, place] = op(q, made.kv._replace(cache=cache), batch, kind.attend, 90).view_as(clean), clean
    return found


def check_wild(op, grouped: int, dtype: torch.dtype, chosen: slice = slice(None)) -> None:
    for kind in kinds(grouped)[chosen]:
        read = kind.read(151)
        for (wild, place), (got, clean) in wild_results(op, grouped, dtype, kind).items():
            readers = read[:, place]
            assert not got[readers, :, -1].isfinite().any(), (kind, wild, place)
            got[readers, :, -1] = clean[readers, :, -1]
            assert torch.equal(got, clean), (kind, wild, place)


def check_any_cut(op, heads: Heads, dtype: torch.dtype, chosen: slice = slice(None)) -> None:
    """A query has the same bits in any chunk and among others."""
    length = 700
    made, q = paged(heads, [length, 40], dtype=dtype), queries(heads, length, dtype=dtype)
    for kind in kinds(heads.query)[chosen]:
        attend, spans = kind.attend._replace(scale=heads.dim**-0.5), kind.table(length)

        def chunks(borders, attend=attend, spans=spans):
            """Attend the prompt cut at these places, all chunks in one call."""
            ends, part = torch.tensor(borders), slice(borders[0], borders[-1])
            rows = made.rows[:1].repeat(len(borders) - 1)
            batch = RowBatch(rows, ends[1:], ends - ends[0], None if spans is None else spans[part].contiguous())
            return op(q[part], made.kv, batch, attend, length)

        whole = chunks([0, length])
        for cuts in ([1], [15, 16, 17], [60, 64, 65, 90, 200], [500, 699]):
            borders = [0, *cuts, length]
            assert torch.equal(chunks(borders), whole), (kind, cuts)
            assert torch.equal(torch.cat([chunks(list(pair)) for pair in itertools.pairwise(borders)]), whole), cuts


def test_a_null_row_reads_its_one_entry_in_cpp():
    check_null_row(load_native().prefill_attention, F32)


def test_a_nan_that_is_read_is_not_hidden_in_cpp():
    kernels, heads = load_native(), Heads(1, 1, 64)
    made, q = paged(heads, [40, 40], dtype=F32), queries(heads, 2, dtype=F32)
    for kind in (0, 1):
        cache = made.cache.clone()
        cache[made.page_table[made.rows[0], 1], LAYER, kind, 3] = torch.nan
        got = kernels.decode_attention(q, made.kv._replace(cache=cache), made.batch, Attend(0.125))
        assert got[0].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("grouped", [1, 3, 4])
def test_a_value_that_is_no_number_stays_with_its_readers_in_cpp(grouped, dtype):
    check_wild(load_native().prefill_attention, grouped, dtype)
    check_wild(native.invariant(load_native()).prefill_attention, grouped, dtype)


def test_threads_give_the_same_bits_in_cpp():
    kernels, heads = load_native(), Heads(4, 2, 128)
    made = paged(heads, LENGTHS, dtype=BF16)
    prompts = made.batch._replace(starts=torch.tensor([0, *CHUNKS]).cumsum(0))
    for kind in kinds(4)[:2]:
        check_threads(
            lambda q, kind=kind: kernels.decode_attention(q, made.kv, made.batch, kind.attend),
            queries(heads, 9, dtype=BF16),
        )
        check_threads(
            lambda q, kind=kind: kernels.prefill_attention(q, made.kv, prompts, kind.attend, max(CHUNKS)),
            queries(heads, sum(CHUNKS), dtype=BF16),
        )


@pytest.mark.parametrize("heads", [Heads(7, 1, 80), Heads(1, 1, 64), Heads(4, 2, 128), Heads(3, 1, 20)])
def test_a_query_of_a_prompt_has_the_same_bits_in_any_chunk_in_cpp(heads):
    for dtype in LIMITS:
        check_any_cut(load_native().prefill_attention, heads, dtype)


@pytest.mark.process
def test_attention_without_the_bfloat16_dot_product_equals_the_direct_computation(tmp_path):
    """And without AVX-512, by what else the processor has."""
    ops, heads = load_plain_variant(tmp_path), Heads(4, 2, 80)
    made = paged(heads, LENGTHS, dtype=BF16)
    prefill = unpack.prefill_attention(ops.prefill_attention)
    check_decode(unpack.decode_attention(ops.decode_attention), made, queries(heads, len(LENGTHS), dtype=BF16))
    check_prefill(prefill, made, CHUNKS, queries(heads, sum(CHUNKS), dtype=BF16))
    check_any_cut(prefill, Heads(3, 1, 80), BF16)
    check_wild(prefill, 3, BF16)


def test_no_rows_at_all_give_an_empty_result_in_cpp():
    heads, no_rows = Heads(4, 2, 64), torch.empty(0, dtype=torch.long)
    q, made = queries(heads, 0, dtype=F32), paged(heads, [5], dtype=F32)
    assert load_native().decode_attention(q, made.kv, RowBatch(no_rows, no_rows), Attend(1.0)).shape == (0, 4 * 64)


def test_a_page_table_may_be_a_part_of_a_wider_one_in_cpp():
    """The part of one page group: its rows are apart."""
    kernels, heads = load_native(), Heads(4, 2, 64)
    made, q = paged(heads, LENGTHS, dtype=F32), queries(heads, len(LENGTHS), dtype=F32)
    wide = torch.full((len(made.page_table), 2 * made.page_table.shape[1] + 1), 1 << 20, dtype=torch.int32)
    part = wide[:, 1 : 1 + made.page_table.shape[1]]
    part.copy_(made.page_table)
    ones = made.batch._replace(starts=torch.arange(len(LENGTHS) + 1))
    found = [
        (
            kernels.decode_attention(q, kv, made.batch, Attend(0.125)),
            kernels.prefill_attention(q, kv, ones, Attend(0.125), 1),
        )
        for kv in (made.kv, made.kv._replace(page_table=part))
    ]
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
