"""A prompt's attention on AMX, its tile operations emulated: against a direct computation in float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernels.native_kernels import load_native
from kernels.test_native_amx import arguments
from kernels.test_native_attention import (
    CHUNKS,
    LAYER,
    TOLERANCE,
    check_any_cut,
    check_prefill,
    check_wild,
    made,
    queries,
    wild_results,
)

from gapless.kernels.views import RowBatch

HEADS = [(2, 1, 64), (1, 1, 128), (2, 2, 128), (1, 4, 96), (2, 8, 64), (1, 7, 128), (1, 3, 32), (1, 2, 256)]
"""(KV heads, query heads for each, head size)"""


@pytest.fixture(scope="module")
def library(emulated_amx):
    loaded = ctypes.CDLL(str(emulated_amx))
    loaded.attends.restype, loaded.attend.restype = ctypes.c_bool, ctypes.c_char_p
    return loaded


@pytest.fixture
def prefill(library):
    """The emulated kernel, with the arguments of `seam.Kernels.prefill_attention`."""

    def call(q, kv, batch, scale, max_query, threads=1):
        _, layers, _, page_size, kv_heads, dim = kv.cache.shape
        assert library.attends(ctypes.c_int64(dim))
        out = torch.full((len(q) + 1, q.shape[1] * dim), torch.nan, dtype=q.dtype)
        table = kv.page_table
        whole = [x.contiguous() for x in (batch.rows, batch.starts, batch.kv_lens)]
        queries = (q, q.stride(0), q.shape[1], len(batch.rows))
        pages = (kv.cache, layers, page_size, kv_heads, dim, kv.layer, table, table.stride(0))
        given = arguments(*queries, *pages, *whole, out, threads)
        assert library.attend(*given, ctypes.c_float(scale)) == b""
        assert out[-1].isnan().all()
        return out[:-1]

    return call


@pytest.mark.parametrize(("kv_heads", "grouped", "dim"), HEADS)
def test_it_agrees_with_float64(prefill, kv_heads, grouped, dim):
    """Whole prompts, chunks behind cached context, single queries."""
    case = made(kv_heads, dim, torch.bfloat16)
    check_prefill(prefill, case, CHUNKS, kv_heads, grouped, dim, torch.bfloat16)


@pytest.mark.parametrize(("kv_heads", "grouped", "dim"), [(1, 1, 64), (2, 2, 64), (1, 3, 96), (1, 8, 32)])
def test_a_query_has_the_same_bits_in_any_chunk_and_among_others(prefill, kv_heads, grouped, dim):
    check_any_cut(prefill, kv_heads, grouped, dim, torch.bfloat16)


def test_threads_give_the_same_bits(prefill):
    case = made(2, 64, torch.bfloat16, lengths=(300,))
    q, batch = queries(300, 2, 4, 64, torch.bfloat16), case.batch._replace(starts=torch.tensor([0, 300]))
    alone = prefill(q, case.kv, batch, 0.125, 300)
    assert torch.equal(prefill(q, case.kv, batch, 0.125, 300, threads=3), alone)


def test_a_null_row_reads_its_one_entry(prefill):
    """An inert row: KV length 1 whatever its page table and its chunk say."""
    case = made(2, 64, torch.bfloat16, lengths=(40,))
    case.cache[0, LAYER, :, 0] = torch.randn(2, 2, 64).bfloat16()
    null = RowBatch(torch.tensor([0]), torch.tensor([1]), torch.tensor([0, 5]))
    got = prefill(torch.randn(5, 4, 64).bfloat16(), case.kv, null, 0.125, 5)
    assert torch.equal(got, case.cache[0, LAYER, 1, 0].repeat_interleave(2, 0).flatten().expand(5, -1))


def test_a_nan_that_is_read_is_not_hidden(prefill):
    case = made(1, 64, torch.bfloat16, lengths=(100, 100))
    q, batch = torch.randn(200, 1, 64).bfloat16(), case.batch._replace(starts=torch.tensor([0, 100, 200]))
    for kind in (0, 1):
        cache = case.cache.clone()
        cache[case.table[case.rows[0], 4].long(), LAYER, kind, 3] = torch.nan
        got = prefill(q, case.kv._replace(cache=cache), batch, 0.125, 100)
        assert got[67:100].isnan().all() and got[:67].isfinite().all() and got[100:].isfinite().all()


@pytest.mark.parametrize("grouped", [1, 3, 4])
def test_a_value_that_is_no_number_stays_with_those_who_read_it(prefill, grouped):
    check_wild(prefill, grouped, torch.bfloat16)


def test_values_that_are_no_numbers_give_what_the_vectors_give(prefill):
    ours, vectors = (wild_results(op, 2, torch.bfloat16) for op in (prefill, load_native().prefill_attention))
    for key, (got, _) in ours.items():
        want = vectors[key][0]
        assert torch.equal(got.isfinite(), want.isfinite()), key  # of an infinite value either path may make NaN
        found, wanted = (torch.where(got.isfinite(), x, 0) for x in (got, want))
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_large_and_growing_scores_give_the_direct_sums(prefill):
    """The largest score so far grows from block to block, and the sums shrink with it."""
    case = made(1, 64, torch.bfloat16, lengths=(300,))
    pages = case.table[case.rows[0], :19].long()
    case.cache[pages, LAYER, 0] *= torch.linspace(1, 20, 19).view(-1, 1, 1, 1).bfloat16()
    check_prefill(prefill, case, [300], 1, 2, 64, torch.bfloat16)


def test_it_serves_whole_multiples_of_32_only(library):
    served = [dim for dim in range(1, 321) if library.attends(ctypes.c_int64(dim))]
    assert served == [32, 64, 96, 128, 160, 192, 224, 256]


def test_no_chunks_at_all_give_an_empty_result(prefill):
    case, none = made(1, 64, torch.bfloat16), torch.empty(0, dtype=torch.long)
    batch = RowBatch(none, none, torch.zeros(1, dtype=torch.long))
    assert prefill(torch.empty(0, 2, 64).bfloat16(), case.kv, batch, 1.0, 0).shape == (0, 128)
