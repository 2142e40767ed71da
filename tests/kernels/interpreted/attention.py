"""The Triton attention kernels in Triton's interpreter against a direct computation in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import fused_reference
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from paged import LAYER, Heads, chunked, direct, paged, queries, unturned

from gapless.kernels import attention_triton as kernels
from gapless.kernels import few_rows, rope_triton, splits_triton, unpack
from gapless.kernels.attention_triton import AttentionTiles

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIMITS = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}
SIZES = [(dim, dtype) for dim in (64, 80, 96, 128, 256) for dtype in (F32, F16)] + [(128, BF16)]
SMALL = AttentionTiles(16, 16, 4, 2)


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    """What a kernel ought to write and does not is seen."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


def check(got, want):
    assert got.isfinite().all()
    assert (got.double() - want).abs().max() < LIMITS[got.dtype], (got.double() - want).abs().amax(1)


def decode(heads, lengths, dtype=F32, page_size=16, **how):
    batch, q = paged(heads, lengths, page_size=page_size, dtype=dtype), queries(heads, len(lengths), dtype=dtype)
    scale = heads.dim**-0.5
    got = kernels.decode_attention(q, batch.cache, LAYER, *batch[1:], scale, **how)
    check(got, direct(q, batch, list(range(len(lengths))), lengths, scale))


def prefill(heads, sizes, lengths, dtype=F32, page_size=16, padding=0, rows=None, **how):
    """`rows`: the chunks are padded with empty ones to this many."""
    starts, chunk_of, seen = chunked(sizes, lengths)
    batch = paged(heads, lengths, page_size=page_size, dtype=dtype)
    empty = (rows or len(sizes)) - len(sizes)
    row = torch.cat([batch.rows, torch.zeros(empty, dtype=torch.int64)])
    kv_lens = torch.cat([batch.kv_lens, torch.ones(empty, dtype=torch.int64)])
    start = torch.tensor(starts + [starts[-1]] * empty)
    q, scale = queries(heads, starts[-1] + padding, dtype=dtype), heads.dim**-0.5
    most = max(sizes)
    got = kernels.prefill_attention(q, batch.cache, LAYER, batch.page_table, row, start, kv_lens, scale, most, **how)
    want = direct(q[: starts[-1]], batch, chunk_of, seen, scale)
    check(got, torch.cat([want, torch.zeros(padding, want.shape[1])]))


@pytest.mark.parametrize("group", (1, 2, 4, 8))
def test_decode_of_query_heads_that_share_keys(group):
    decode(Heads(2 * group, 2, 16), [1, 16, 17, 70], tiles=SMALL, splits=3, least=16)


@pytest.mark.parametrize(("dim", "dtype"), SIZES, ids=str)
def test_decode_of_every_head_size_equals_float64(dim, dtype):
    decode(Heads(4, 2, dim), [1, 33, 150], dtype, splits=2)


@pytest.mark.parametrize("page_size", (5, 8, 16, 32))
def test_decode_of_every_page_size_equals_float64(page_size):
    decode(Heads(4, 2, 32), [page_size - 1, page_size, page_size + 1, 3 * page_size], page_size=page_size)


@pytest.mark.parametrize("lengths", ([1, 1, 1], [400], [300, 1, 2], [16, 32, 48, 64]), ids=str)
@pytest.mark.parametrize("splits", (1, 2, 7))
@pytest.mark.parametrize("many", (False, True))
def test_decode_split_in_every_way_equals_float64(lengths, splits, many):
    """With the combining program of its own, or by the last to arrive, which leaves the counters as they were."""
    decode(Heads(2, 1, 16), lengths, tiles=SMALL, splits=splits, least=16, many=many)
    cpu = torch.device("cpu")
    assert not kernels.counters(cpu, kernels.GRID_PER_SM * kernels.multiprocessors(cpu)).any()


def test_decode_of_seven_heads_a_group_equals_float64():
    decode(Heads(14, 2, 32), [5, 40], tiles=SMALL)


def test_decode_of_more_rows_than_are_summed_at_once(monkeypatch):
    monkeypatch.setattr(splits_triton, "ROWS_AT_ONCE", kernels.tl.constexpr(4))
    decode(Heads(1, 1, 16), [1] * 6 + [20, 33, 40], tiles=SMALL, splits=2, least=16, per_sm=4)


def test_a_row_of_nothing_gives_zeros():
    batch, q = paged(Heads(2, 1, 16), [5, 5], dtype=F32), queries(Heads(2, 1, 16), 2, dtype=F32)
    for splits in (1, 2):
        lens = torch.tensor([0, 5])
        got = kernels.decode_attention(q, *batch[:1], LAYER, *batch[1:3], lens, 1.0, splits=splits)
        assert not got[0].any() and got[1].all()


@pytest.mark.parametrize("group", (1, 2, 4, 8))
def test_prefill_of_query_heads_that_share_keys(group):
    prefill(Heads(2 * group, 2, 16), [1, 5, 30], [1, 16, 47], tiles=SMALL)


@pytest.mark.parametrize("splits", (2, 7, 16))
@pytest.mark.parametrize("padding", (0, 5))
def test_prefill_split_in_every_way_equals_float64(splits, padding):
    """Of contexts that are shorter than a tile, than all splits, and longer; NaN in what no program writes is seen."""
    sizes, lengths = [1, 5, 30, 3, 1], [1, 16, 500, 150, 257]
    prefill(Heads(4, 2, 16), sizes, lengths, tiles=SMALL, splits=splits, padding=padding, rows=7)


@pytest.mark.parametrize(("dim", "group", "dtype"), ((80, 3, F16), (128, 4, BF16), (256, 1, F32)), ids=str)
def test_prefill_that_is_split_of_other_heads_equals_float64(dim, group, dtype):
    prefill(Heads(2 * group, 2, dim), [3, 9], [400, 310], dtype, page_size=5, splits=5)


@pytest.mark.parametrize("splits", (1, 2))
def test_a_row_whose_scores_are_infinite_is_nan_however_it_is_split(splits, monkeypatch):
    """A row of bad KV is known by that, and memory that nothing was written to may hold any number."""
    heads, empty = Heads(2, 2, 16), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(7.0))
    batch, q = paged(heads, [520], dtype=F32), queries(heads, 3, dtype=F32).abs()
    batch.cache[batch.page_table[batch.rows[0], 0], LAYER, 0, 5] = float("inf")
    start = torch.tensor([0, 3])
    with np.errstate(invalid="ignore", over="ignore"):
        got = kernels.prefill_attention(
            q, batch.cache, LAYER, batch.page_table, batch.rows, start, batch.kv_lens, 1.0, 3, splits=splits
        )
    assert got.isnan().all()


def test_a_few_tokens_are_split_by_themselves_and_many_are_not(monkeypatch):
    seen = []
    monkeypatch.setattr(
        kernels, "split_space", lambda q, splits: seen.append(splits) or splits_triton.split_space(q, splits)
    )
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 8)
    prefill(Heads(2, 2, 16), [3], [1100], tiles=SMALL)
    prefill(Heads(2, 2, 16), [70], [1100], tiles=SMALL)
    assert seen == [4]


@pytest.mark.parametrize(("dim", "dtype"), SIZES, ids=str)
def test_prefill_of_every_head_size_equals_float64(dim, dtype):
    prefill(Heads(4, 2, dim), [40, 3], [70, 3], dtype)


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    (
        ([1], [1]),
        ([16], [16]),
        ([17], [17]),
        ([1, 1, 1], [1, 40, 33]),
        ([33, 1, 8, 16], [33, 65, 8, 80]),
        ([5, 64], [100, 64]),
    ),
    ids=str,
)
@pytest.mark.parametrize("tiles", (SMALL, AttentionTiles(32, 16, 4, 2)), ids=str)
def test_prefill_of_fresh_and_continued_chunks_equals_float64(sizes, lengths, tiles):
    prefill(Heads(2, 1, 16), sizes, lengths, tiles=tiles)


@pytest.mark.parametrize("padding", (1, 7, 40))
@pytest.mark.parametrize("rows", (2, 3, 8))
def test_padding_of_tokens_and_chunks_gives_zeros(padding, rows):
    prefill(Heads(2, 1, 16), [9, 4], [9, 30], padding=padding, rows=rows, tiles=SMALL)


def test_prefill_of_three_and_seven_heads_a_group_equals_float64():
    prefill(Heads(6, 2, 16), [9, 20], [12, 20], tiles=SMALL)
    prefill(Heads(14, 2, 16), [9, 20], [12, 20], tiles=SMALL)


class Seen(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("page_size", (5, 8, 32))
def test_prefill_of_every_page_size_equals_float64(page_size):
    prefill(Heads(4, 2, 32), [20, 3], [50, 3], page_size=page_size)


def test_the_operators_compute_the_same_and_a_dispatch_mode_sees_one_each():
    heads, scale = Heads(4, 2, 16), 0.25
    batch, q = paged(heads, [20, 33], dtype=F32), queries(heads, 2, dtype=F32)
    want = direct(q, batch, [0, 1], [20, 33], scale)
    starts = torch.tensor([0, 1, 2])
    with Seen() as seen:
        decoded = torch.ops.gapless.triton_decode_attention(q, batch.cache, LAYER, *batch[1:], scale)
        args = (q, batch.cache, LAYER, batch.page_table, batch.rows, starts, batch.kv_lens, scale, 1)
        filled = torch.ops.gapless.triton_prefill_attention(*args)
    check(decoded, want)
    check(filled, want)
    assert seen.names == ["gapless.triton_decode_attention.default", "gapless.triton_prefill_attention.default"]


@pytest.mark.parametrize("heads", (Heads(4, 2, 16), Heads(3, 1, 24)), ids=str)
@pytest.mark.parametrize("norm", (False, True))
@pytest.mark.parametrize(
    ("lengths", "many"), (([1, 17, 70, 33], False), ([1, 17, 70, 33], True), ([1, 17, 70, 33, 49, 90], None)), ids=str
)
def test_decode_that_rotates_and_writes_first(heads, norm, lengths, many):
    """Against the rotation's own kernel, and the float64 answer over the cache that it leaves."""
    batch = paged(heads, lengths, dtype=F32)
    turn, scale = unturned(heads, batch, norm), heads.dim**-0.5
    wanted, qkv = batch._replace(cache=batch.cache.clone()), turn.qkv.clone()
    unpack.rope_and_write(rope_triton.rope_and_write)(qkv, turn.rotation, wanted.kv, turn.tokens)
    got = kernels.decode_attention(
        turn.qkv[:, : heads.query], batch.cache, LAYER, *batch[1:], scale, tiles=SMALL, splits=3, least=16,
        many=many, unturned=kernels.Unturned(*turn[1:]),
    )  # fmt: skip
    torch.testing.assert_close(batch.cache, wanted.cache, rtol=1e-6, atol=1e-6, equal_nan=True)
    check(got, direct(qkv[:, : heads.query], wanted, list(range(len(lengths))), lengths, scale))


@pytest.mark.parametrize(
    ("heads", "lengths"),
    # The last has more rows and heads than the interpreter's GPU has counters, and one split each.
    ((Heads(4, 2, 16), [1, 17, 70]), (Heads(4, 2, 16), [1, 17, 70, 33, 5, 64]), (Heads(8, 8, 16), [1, 9, 4, 3, 5, 7])),
    ids=str,
)
def test_decode_of_few_rows_equals_the_twin(heads, lengths):
    """Rotated, written and read in one operation."""
    found = []
    for few in (few_rows.FEW_ROWS, fused_reference.FEW_ROWS):
        batch = paged(heads, lengths, dtype=F32)
        turn = unturned(heads, batch, True)
        out = few.decode(turn.qkv, turn.rotation, batch.kv, turn.tokens, batch.batch, heads.dim**-0.5)
        found.append((out, batch.cache))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
