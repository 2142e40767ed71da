"""Paged attention of the C++ kernels against a direct computation in float64."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from kernels.native_kernels import check_threads, load_native, load_plain_variant
from torch import Tensor

from gapless.kernels import unpack
from gapless.kernels.views import KV, RowBatch

LAYERS, LAYER, PAGE = 3, 1, 16
LENGTHS = (1, 5, 16, 17, 64, 65, 130, 700, 1030)
"""Around the page, the block of 64 keys and the split of 512"""
CHUNKS = [1, 5, 9, 17, 1, 33, 100, 200, 2]
"""This many of the last tokens of each length are a prefill chunk"""
HEADS = [(2, 1, 64), (2, 2, 128), (1, 4, 80), (2, 8, 64), (1, 7, 128), (1, 3, 16), (2, 2, 20), (1, 1, 256)]
"""(KV heads, query heads for each, head size)"""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""bfloat16: the result is rounded (2**-9 of up to 4), and so are the products' inputs, which both sides share."""


class Case(NamedTuple):
    cache: Tensor
    table: Tensor
    rows: Tensor
    lengths: Tensor

    @property
    def kv(self) -> KV:
        return KV(self.cache, LAYER, self.table)

    @property
    def batch(self) -> RowBatch:
        return RowBatch(self.rows, self.lengths)


def made(kv_heads: int, dim: int, dtype: torch.dtype, lengths=LENGTHS) -> Case:
    """Pages in random order. What no row reads is NaN: other layers, unused pages, the ends of last pages."""
    torch.manual_seed(0)
    pages = [-(-length // PAGE) for length in lengths]
    cache = torch.full((sum(pages) + 3, LAYERS, 2, PAGE, kv_heads, dim), torch.nan, dtype=dtype)
    table = torch.zeros(len(lengths) + 2, max(pages) + 1, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 1)[: len(lengths)] + 1
    free = torch.randperm(sum(pages) + 2) + 1
    for row, length, count in zip(rows, lengths, pages, strict=True):
        own, free = free[:count], free[count:]
        table[row, :count] = own.int()
        position = torch.arange(length)
        cache[own[position // PAGE], LAYER, :, position % PAGE] = torch.randn(length, 2, kv_heads, dim).to(dtype)
    return Case(cache, table, rows, torch.tensor(lengths))


def queries(tokens: int, kv_heads: int, grouped: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A strided view, as the model has it: queries lie before keys and values."""
    return torch.randn(tokens, kv_heads * (grouped + 2), dim).to(dtype)[:, : kv_heads * grouped]


def direct(q: Tensor, case: Case, index: int, first: int) -> Tensor:
    """Attention of one row's queries, the first at position `first`, in float64."""
    length, grouped = int(case.lengths[index]), q.shape[1] // case.cache.shape[4]
    position = torch.arange(length)
    pages = case.table[case.rows[index]].long()[position // PAGE]
    k, v = case.cache[pages, LAYER, :, position % PAGE].double().repeat_interleave(grouped, 2).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[2])
    ahead = position > first + torch.arange(q.shape[0])[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -math.inf).softmax(-1), v).flatten(1)


def check_decode(op, case: Case, q: Tensor) -> Tensor:
    got = op(q, case.kv, case.batch, q.shape[2] ** -0.5)
    for i, length in enumerate(case.lengths.tolist()):
        want = direct(q[i : i + 1], case, i, length - 1)[0]
        torch.testing.assert_close(got[i].double(), want, rtol=0, atol=TOLERANCE[q.dtype])
    return got


def check_prefill(op, case: Case, sizes: list[int], kv_heads: int, grouped: int, dim: int, dtype: torch.dtype) -> None:
    starts = torch.tensor([0, *sizes]).cumsum(0)
    q = queries(sum(sizes), kv_heads, grouped, dim, dtype)
    got = op(q, case.kv, case.batch._replace(starts=starts), dim**-0.5, max(sizes))
    for i, (low, high) in enumerate(itertools.pairwise(starts)):
        want = direct(q[low:high], case, i, int(case.lengths[i]) - sizes[i])
        torch.testing.assert_close(got[low:high].double(), want, rtol=0, atol=TOLERANCE[dtype])


def wild_results(op, grouped: int, dtype: torch.dtype) -> dict[tuple[float, int], tuple[Tensor, Tensor]]:
    """By the last dim of one value of 151, and its place: what comes with it and without, [151, heads, dim].

    In two chunks: some queries of the second one read all of the prompt.
    """
    length, found = 151, {}
    case = made(1, 64, dtype, lengths=(length,))
    q = queries(length, 1, grouped, 64, dtype)
    batch = RowBatch(case.rows.repeat(2), torch.tensor([90, length]), torch.tensor([0, 90, length]))
    clean = op(q, case.kv, batch, 0.125, 90).view(length, grouped, 64)
    for wild, place in itertools.product((math.nan, math.inf, -math.inf), (0, 30, 61, 64, 89, 90, 128, 149, 150)):
        cache = case.cache.clone()
        cache[case.table[case.rows[0], place // PAGE].long(), LAYER, 1, place % PAGE, :, -1] = wild
        found[wild, place] = op(q, case.kv._replace(cache=cache), batch, 0.125, 90).view_as(clean), clean
    return found


def check_wild(op, grouped: int, dtype: torch.dtype) -> None:
    for (wild, place), (got, clean) in wild_results(op, grouped, dtype).items():
        assert not got[place:, :, -1].isfinite().any(), (wild, place)
        got[place:, :, -1] = clean[place:, :, -1]
        assert torch.equal(got, clean), (wild, place)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "grouped", "dim"), HEADS)
def test_decode_attention_equals_the_direct_computation(kv_heads, grouped, dim, dtype):
    op = load_native().decode_attention
    case = made(kv_heads, dim, dtype)
    q = queries(len(LENGTHS), kv_heads, grouped, dim, dtype)
    got = check_decode(op, case, q)
    for i in (0, 4, 8):  # a row alone gives the same bits
        one = slice(i, i + 1)
        alone = op(q[one], case.kv, RowBatch(case.rows[one], case.lengths[one]), dim**-0.5)
        assert torch.equal(alone[0], got[i])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "grouped", "dim"), HEADS)
def test_prefill_attention_equals_the_direct_computation(kv_heads, grouped, dim, dtype):
    """Whole prompts, chunks behind cached context, single queries."""
    case = made(kv_heads, dim, dtype)
    check_prefill(
        load_native().prefill_attention, case, [1, 5, 9, 17, 1, 33, 100, 200, 2], kv_heads, grouped, dim, dtype
    )


def test_a_null_row_reads_its_one_entry():
    """An inert row: KV length 1 whatever its page table and its chunk say."""
    kernels = load_native()
    case = made(2, 64, torch.float32, lengths=(40,))
    case.cache[0, LAYER, :, 0] = torch.randn(2, 2, 64)
    q, null = torch.randn(5, 4, 64), RowBatch(torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 5]))
    want = case.cache[0, LAYER, 1, 0].repeat_interleave(2, 0).flatten()
    got = kernels.decode_attention(q[:1], case.kv, null, 0.125)
    torch.testing.assert_close(got[0], want)
    got = kernels.prefill_attention(q, case.kv, null, 0.125, 5)
    torch.testing.assert_close(got, want.expand(5, -1))


def test_a_nan_that_is_read_is_not_hidden():
    kernels = load_native()
    case = made(1, 64, torch.float32, lengths=(40, 40))
    q = torch.randn(2, 1, 64)
    for kind in (0, 1):
        cache = case.cache.clone()
        cache[case.table[case.rows[0], 1].long(), LAYER, kind, 3] = torch.nan
        got = kernels.decode_attention(q, case.kv._replace(cache=cache), case.batch, 0.125)
        assert got[0].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("grouped", [1, 3, 4])
def test_a_value_that_is_no_number_stays_with_those_who_read_it(grouped, dtype):
    check_wild(load_native().prefill_attention, grouped, dtype)


def test_threads_give_the_same_bits():
    kernels, case = load_native(), made(2, 128, torch.bfloat16)
    check_threads(
        lambda q: kernels.decode_attention(q, case.kv, case.batch, 0.1), queries(9, 2, 2, 128, torch.bfloat16)
    )
    prompts = case.batch._replace(starts=torch.tensor([0, *CHUNKS]).cumsum(0))
    check_threads(
        lambda q: kernels.prefill_attention(q, case.kv, prompts, 0.1, max(CHUNKS)),
        queries(sum(CHUNKS), 2, 2, 128, torch.bfloat16),
    )


def check_any_cut(op, kv_heads: int, grouped: int, dim: int, dtype: torch.dtype) -> None:
    """A query has the same bits in any chunk and among others."""
    case = made(kv_heads, dim, dtype)
    length = 700
    index = LENGTHS.index(length)
    q, row = queries(length, kv_heads, grouped, dim, dtype), case.rows[index : index + 1]

    def chunks(borders):
        """Attend the prompt cut at these places, all chunks in one call."""
        ends = torch.tensor(borders)
        batch = RowBatch(row.repeat(len(borders) - 1), ends[1:], ends - ends[0])
        return op(q[borders[0] : borders[-1]], case.kv, batch, dim**-0.5, length)

    whole = chunks([0, length])
    for cuts in ([1], [15, 16, 17], [31, 64, 65, 127, 200], [500, 699]):
        borders = [0, *cuts, length]
        assert torch.equal(chunks(borders), whole), cuts
        assert torch.equal(torch.cat([chunks(list(pair)) for pair in itertools.pairwise(borders)]), whole), cuts


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kv_heads", "grouped", "dim"), [(1, 1, 64), (2, 2, 128), (1, 7, 80), (1, 3, 20)])
def test_a_query_of_a_prompt_has_the_same_bits_in_any_chunk_and_among_others(kv_heads, grouped, dim, dtype):
    check_any_cut(load_native().prefill_attention, kv_heads, grouped, dim, dtype)


@pytest.mark.parametrize("dim", [1, 2, 7, 15, 17, 31, 33, 63, 100, 129, 250, 255, 257, 300])
def test_heads_of_any_size_equal_the_direct_computation(dim):
    kernels, lengths, sizes = load_native(), (130, 70), [130, 3]
    for dtype in TOLERANCE:
        case = made(1, dim, dtype, lengths=lengths)
        check_prefill(kernels.prefill_attention, case, sizes, 1, 3, dim, dtype)
        check_decode(kernels.decode_attention, case, queries(2, 1, 3, dim, dtype))


def test_attention_without_the_bfloat16_dot_product_equals_the_direct_computation(tmp_path):
    """And without AVX-512, by what else the processor has."""
    ops = load_plain_variant(tmp_path)
    case = made(2, 80, torch.bfloat16)
    decode, prefill = (
        unpack.decode_attention(ops.decode_attention),
        unpack.prefill_attention(ops.prefill_attention),
    )
    check_decode(decode, case, queries(len(LENGTHS), 2, 2, 80, torch.bfloat16))
    check_prefill(prefill, case, CHUNKS, 2, 2, 80, torch.bfloat16)
    check_any_cut(prefill, 1, 3, 80, torch.bfloat16)
    check_wild(prefill, 3, torch.bfloat16)


def test_no_rows_at_all_give_an_empty_result():
    case = made(2, 64, torch.float32)
    no_rows = torch.empty(0, dtype=torch.long)
    q = queries(0, 2, 2, 64, torch.float32)
    out = load_native().decode_attention(q, case.kv, RowBatch(no_rows, no_rows), 1.0)
    assert out.shape == (0, 4 * 64)


def test_a_page_table_that_is_a_part_of_a_wider_one():
    """The part of one page group: its rows are apart."""
    kernels, case = load_native(), made(2, 64, torch.float32)
    wide = torch.full((len(case.table), 2 * case.table.shape[1] + 1), 1 << 20, dtype=torch.int32)
    part = wide[:, 1 : 1 + case.table.shape[1]]
    part.copy_(case.table)
    q, starts = queries(len(LENGTHS), 2, 2, 64, torch.float32), torch.arange(len(LENGTHS) + 1)
    ones = case.batch._replace(starts=starts)
    found = [
        (kernels.decode_attention(q, kv, case.batch, 0.125), kernels.prefill_attention(q, kv, ones, 0.125, 1))
        for kv in (case.kv, case.kv._replace(page_table=part))
    ]
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
