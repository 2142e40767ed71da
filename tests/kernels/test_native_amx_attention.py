"""A prompt's attention on AMX, its tile operations emulated: against a direct computation in float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernels.attend_cases import CPU_CASES, check_prefill_case, for_prefill, near
from kernels.kv_cases import FORMATS, given_in
from kernels.native_kernels import load_native
from kernels.paged import LAYER, Heads, paged, queries
from kernels.test_attention import (
    CHUNKS,
    LENGTHS,
    LIMITS,
    check_any_cut,
    check_null_row,
    check_prefill,
    check_wild,
    kinds,
    wild_results,
)
from kernels.test_native_amx import arguments
from sharpest import sharpest

from gapless.kernels.views import Attend, RowBatch

BF16 = torch.bfloat16
STORED = [BF16, torch.float8_e4m3fn, torch.uint8]
HEADS = [
    Heads(1, 1, 64), Heads(1, 1, 128), Heads(4, 2, 128), Heads(4, 1, 96), Heads(16, 2, 64), Heads(7, 1, 128),
    Heads(3, 1, 32), Heads(2, 1, 256),
]  # fmt: skip

AMX_CASES = [case for case in CPU_CASES if case.shape.heads.dim % 32 == 0]


@pytest.fixture(scope="module")
def library(emulated_amx):
    loaded = ctypes.CDLL(str(emulated_amx))
    loaded.attends.restype, loaded.attend.restype = ctypes.c_bool, ctypes.c_char_p
    return loaded


@pytest.fixture
def prefill(library):
    """The emulated kernel, with the arguments of `seam.Kernels.prefill_attention`."""

    def call(q, kv, batch, attend, max_query, threads=1):
        (_, layers, _, page_size, kv_heads, _), dim = kv.cache.shape, kv.head_dim
        assert library.attends(ctypes.c_int64(dim))
        out = torch.full((len(q) + 1, q.shape[1] * dim), torch.nan, dtype=q.dtype)
        table = kv.page_table
        whole = [x.contiguous() for x in (batch.rows, batch.starts, batch.kv_lens)]
        queries = (q, q.stride(0), q.shape[1], len(batch.rows))
        pages = (STORED.index(kv.cache.dtype), kv.cache, layers, page_size, kv_heads, dim, kv.layer)
        key, value = (1.0, 1.0) if kv.scales is None else kv.scales[kv.layer].tolist()
        numbers = (attend.scale * key, attend.softcap, 1.0 if kv.cache.dtype == torch.uint8 else value)
        kind = (batch.spans, int(attend.reach), attend.size, attend.sinks)
        given = arguments(*queries, *pages, table, table.stride(0), *whole, *kind, out, threads)
        assert library.attend(*given, *map(ctypes.c_float, numbers)) == b""
        assert out[-1].isnan().all()
        return out[:-1]

    return call


@pytest.mark.parametrize("heads", sharpest(HEADS, 4))
def test_attention_by_tiles_equals_float64(prefill, heads):
    """Whole prompts, chunks behind cached context, single queries."""
    check_prefill(prefill, paged(heads, LENGTHS, dtype=BF16), CHUNKS, queries(heads, sum(CHUNKS), dtype=BF16))


@pytest.mark.parametrize("case", sharpest(AMX_CASES, 6), ids=str)
def test_attention_by_tiles_of_every_kind_equals_float64(prefill, case):
    check_prefill_case(prefill, case, BF16)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("case", sharpest(AMX_CASES, 6), ids=str)
def test_attention_by_tiles_over_fewer_bits_equals_float64(prefill, case, stored):
    given, wanted = given_in(for_prefill(case, BF16), stored)
    got = prefill(given.q, given.made.kv, given.batch, given.attend, max(case.shape.sizes))
    near(got[: len(given.ranges)], wanted)


@pytest.mark.parametrize("heads", sharpest([Heads(1, 1, 64), Heads(4, 2, 64), Heads(3, 1, 96), Heads(8, 1, 32)]))
def test_a_query_has_the_same_bits_in_any_chunk_and_among_others(prefill, heads):
    check_any_cut(prefill, heads, BF16, slice(3))


def test_threads_give_the_same_bits(prefill):
    heads = Heads(8, 2, 64)
    made, q = paged(heads, [300], dtype=BF16), queries(heads, 300, dtype=BF16)
    batch = made.batch._replace(starts=torch.tensor([0, 300]))
    alone = prefill(q, made.kv, batch, Attend(0.125), 300)
    assert torch.equal(prefill(q, made.kv, batch, Attend(0.125), 300, threads=3), alone)


def test_a_null_row_reads_its_one_entry(prefill):
    check_null_row(prefill, BF16)


def test_a_nan_that_is_read_is_not_hidden(prefill):
    heads = Heads(1, 1, 64)
    made, q = paged(heads, [100, 100], dtype=BF16), queries(heads, 200, dtype=BF16)
    batch = made.batch._replace(starts=torch.tensor([0, 100, 200]))
    for kind in (0, 1):
        cache = made.cache.clone()
        cache[made.page_table[made.rows[0], 4], LAYER, kind, 3] = torch.nan
        got = prefill(q, made.kv._replace(cache=cache), batch, Attend(0.125), 100)
        assert got[67:100].isnan().all() and got[:67].isfinite().all() and got[100:].isfinite().all()


@pytest.mark.parametrize("grouped", sharpest([3, 1, 4]))
def test_a_value_that_is_no_number_stays_with_its_readers(prefill, grouped):
    check_wild(prefill, grouped, BF16, slice(4))


def test_values_that_are_no_numbers_give_the_results_of_the_vectors(prefill):
    for kind in kinds(2)[:2]:
        ours, vectors = (wild_results(op, 2, BF16, kind) for op in (prefill, load_native().prefill_attention))
        for key, (got, _) in ours.items():
            want = vectors[key][0]
            assert torch.equal(got.isfinite(), want.isfinite()), key  # of an infinite value either path may make NaN
            found, wanted = (torch.where(got.isfinite(), x, 0) for x in (got, want))
            torch.testing.assert_close(found, wanted, rtol=0, atol=LIMITS[BF16])


def test_large_and_growing_scores_give_the_direct_sums(prefill):
    """The largest score so far grows from block to block, and the sums shrink with it."""
    heads = Heads(2, 1, 64)
    made = paged(heads, [300], dtype=BF16)
    pages = made.page_table[made.rows[0], :19].long()
    made.cache[pages, LAYER, 0] *= torch.linspace(1, 20, 19).view(-1, 1, 1, 1).bfloat16()
    check_prefill(prefill, made, [300], queries(heads, 300, dtype=BF16))


def test_heads_of_whole_multiples_of_32_alone_are_served(library):
    served = [dim for dim in range(1, 321) if library.attends(ctypes.c_int64(dim))]
    assert served == [32, 64, 96, 128, 160, 192, 224, 256]


def test_no_chunks_at_all_give_an_empty_result(prefill):
    none = torch.empty(0, dtype=torch.long)
    batch = RowBatch(none, none, torch.zeros(1, dtype=torch.long))
    q = torch.empty(0, 2, 64).bfloat16()
    assert prefill(q, paged(Heads(2, 1, 64), [5], dtype=BF16).kv, batch, Attend(1.0), 0).shape == (0, 128)
