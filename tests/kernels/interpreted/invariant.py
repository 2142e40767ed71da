"""Product and attention that do not depend on the batch, in Triton's interpreter; run by test_invariant_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from invariant_cases import check_attention, check_product
from paged import LAYER, Heads, paged, queries

from gapless.kernels import invariant_attention_triton as attention
from gapless.kernels.attention_triton import AttentionTiles
from gapless.kernels.few_rows_triton import MOST_SPLIT_BLOCKS
from gapless.kernels.invariant_linear_triton import ProductTiles as Product
from gapless.kernels.library_triton import counters

F32, F16 = torch.float32, torch.float16
SMALL = AttentionTiles(16, 16, 4, 2)


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    """What a kernel ought to write and does not is seen."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(("columns", "depth"), [(40, 600), (130, 512), (7, 33), (64, 1024)])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_product_gives_a_row_the_same_bits_in_any_batch(dtype, columns, depth):
    check_product("cpu", dtype, columns, depth, [1, 2, 16, 33, 70])
    assert not counters(torch.device("cpu"), MOST_SPLIT_BLOCKS).any()


@pytest.mark.parametrize("high", (32, 64))
def test_one_program_or_several_give_the_same_bits(high, monkeypatch):
    """What may follow the batch: how high a block is, and who computes a segment."""
    from gapless.kernels import invariant_linear_triton as linear

    tiles = [Product(rows, 32, 16, 48, 4, 2) for rows in (16, high)]
    monkeypatch.setattr(linear, "tiles_for", lambda *_: tiles[0])
    for few in (0, 1000):
        monkeypatch.setattr(linear, "FEW_BLOCKS", few)
        check_product("cpu", F32, 40, 100, [1, 65], tiles=tiles)


@pytest.mark.parametrize("group", (1, 3))
def test_a_query_gets_the_same_bits_in_any_chunk(group):
    cuts = [[1], [16, 17, 64, 130]]
    check_attention("cpu", F32, Heads(group, 1, 16), 136, cuts, [0, 16, 127, 128], SMALL)


@pytest.mark.parametrize("dtype", (F32, F16))
@pytest.mark.parametrize("dim", (64, 80, 128))
def test_every_head_size_gives_the_same_bits_in_any_chunk(dim, dtype):
    check_attention("cpu", dtype, Heads(4, 2, dim), 70, [[33]], [2, 69], None)


def test_a_row_of_many_segments_gets_the_same_bits_in_any_chunk(monkeypatch):
    """Segments of 16 entries up to position 63, of 32 up to 127, of 64 beyond."""
    monkeypatch.setattr(attention, "LEAST_IN_SEGMENT", 16)
    monkeypatch.setattr(attention, "MOST_SEGMENTS", 4)
    cuts = [[63, 65, 127, 129]]
    check_attention("cpu", F32, Heads(2, 1, 16), 140, cuts, [0, 20, 63, 64, 127, 128, 139], SMALL)


def test_other_page_sizes_do_not_depend_on_the_batch():
    check_attention("cpu", F32, Heads(4, 2, 16), 60, [[7, 33]], [0, 31, 59], SMALL, page_size=5)


def test_inert_chunks_and_padding_stay_finite():
    """A chunk of an inert row has one entry; tokens after the last chunk give zeros."""
    heads = Heads(2, 1, 16)
    batch, q = paged(heads, [40, 1, 30], dtype=F32), queries(heads, 60, dtype=F32)
    starts, kv_lens = torch.tensor([0, 20, 37, 40, 40]), torch.tensor([40, 1, 30, 1])
    rows = torch.cat([batch.rows, torch.zeros(1, dtype=torch.int64)])
    got = attention.invariant_prefill(
        q, batch.cache, LAYER, batch.page_table, rows, starts, kv_lens, 0.3, 20, tiles=SMALL
    )
    assert got.isfinite().all() and not got[40:].any() and got[:40].any(1).sum() >= 23
    for shares in (1, 3):
        lens = torch.tensor([0, 1, 30])
        args = (batch.cache, LAYER, batch.page_table, batch.rows, lens)
        out = attention.invariant_decode(q[:3], *args, 0.3, shares=shares, tiles=SMALL)
        assert not out[0].any() and out.isfinite().all()
