"""Attention in Triton: its tiles and splits, rotation within it, and captured launches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forward_cases import Launched
from implementations import BF16, F16, F32, runs
from paged import LAYER, Heads, chunked, direct, paged, queries, unturned
from test_attention import near

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from gapless.kernels import arch, attention, few_rows, plain, rope_triton, splits_triton, unpack
from gapless.kernels import attention_triton as kernels
from gapless.kernels.tiles import AttentionTiles
from gapless.kernels.views import Attend, LayerRows

SMALL = AttentionTiles(16, 16, 4, 2)
QWEN = Heads(16, 8, 128)
ON_GPU = [QWEN, Heads(32, 8, 128), Heads(28, 4, 128), Heads(8, 2, 64), Heads(4, 4, 80), Heads(6, 2, 96)]
EARLY = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
INTERPRETED = ("interpreter",)
pytestmark = pytest.mark.usefixtures("new_memory_is_nan")


def decode(heads, lengths, dtype=F32, page_size=16, **how):
    batch, q = paged(heads, lengths, page_size=page_size, dtype=dtype), queries(heads, len(lengths), dtype=dtype)
    scale = heads.dim**-0.5
    got = kernels.decode_attention(q, batch.cache, LAYER, *batch[1:], scale, **how)
    near(got, direct(q, batch, list(range(len(lengths))), lengths, scale))


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
    got = kernels.prefill_attention(
        q, batch.cache, LAYER, *batch[1:3], row, start, kv_lens, None, *Attend(scale), most, **how
    )
    want = direct(q[: starts[-1]], batch, chunk_of, seen, scale)
    near(got, torch.cat([want, torch.zeros(padding, want.shape[1])]))


@runs("group", [8, 1, 2, 4, 7, 3], on=INTERPRETED, keep=2)
def test_query_heads_that_share_keys_equal_float64(implementation, group):
    decode(Heads(2 * group, 2, 16), [1, 16, 17, 70], tiles=SMALL, splits=3, least=16)
    prefill(Heads(2 * group, 2, 16), [1, 5, 30], [1, 16, 47], tiles=SMALL)


SIZES = [(dim, dtype) for dim in (80, 64, 96, 128, 256) for dtype in (F16, F32)]


@runs("dim, dtype", [(128, BF16), *SIZES], on=INTERPRETED, keep=2)
def test_every_head_size_equals_float64(implementation, dim, dtype):
    """Bfloat16 goes through the interpreter in float32."""
    decode(Heads(4, 2, dim), [1, 33, 150], dtype, splits=2)
    prefill(Heads(4, 2, dim), [40, 3], [70, 3], dtype)


@runs("page_size", [5, 8, 16, 32], on=INTERPRETED, keep=1)
def test_every_page_size_equals_float64(implementation, page_size):
    decode(Heads(4, 2, 32), [page_size - 1, page_size, page_size + 1, 3 * page_size], page_size=page_size)
    prefill(Heads(4, 2, 32), [20, 3], [50, 3], page_size=page_size)


@runs(
    "lengths, splits, many", on=INTERPRETED, keep=4,
    interpreter=[
        ([300, 1, 2], 7, True), ([300, 1, 2], 2, False), ([16, 32, 48, 64], 2, True), ([1, 1, 1], 7, False),
        ([400], 7, True), ([400], 1, True), ([1, 1, 1], 2, True), ([16, 32, 48, 64], 7, False), ([300, 1, 2], 1, False),
    ],
)  # fmt: skip
def test_decode_split_in_every_way_equals_float64(implementation, lengths, splits, many):
    """With the combining program of its own, or by the last to arrive, which leaves the counters as they were."""
    decode(Heads(2, 1, 16), lengths, tiles=SMALL, splits=splits, least=16, many=many)
    cpu = torch.device("cpu")
    assert not kernels.counters(cpu, kernels.GRID_PER_SM * kernels.arch(cpu).processors).any()


@runs(on=INTERPRETED)
def test_decode_of_more_rows_than_are_summed_at_once_equals_float64(implementation, monkeypatch):
    monkeypatch.setattr(splits_triton, "ROWS_AT_ONCE", kernels.tl.constexpr(4))
    decode(Heads(1, 1, 16), [1] * 6 + [20, 33, 40], tiles=SMALL, splits=2, least=16, per_sm=4)


@runs(on=INTERPRETED)
def test_a_row_of_nothing_gives_zeros(implementation):
    batch, q = paged(Heads(2, 1, 16), [5, 5], dtype=F32), queries(Heads(2, 1, 16), 2, dtype=F32)
    for splits in (1, 2):
        lens = torch.tensor([0, 5])
        got = kernels.decode_attention(q, *batch[:1], LAYER, *batch[1:4], lens, 1.0, splits=splits)
        assert not got[0].any() and got[1].all()


@runs("splits, padding", [(7, 5), (2, 0), (16, 5)], on=INTERPRETED, keep=1)
def test_prefill_split_in_every_way_equals_float64(implementation, splits, padding):
    """Of contexts that are shorter than a tile, than all splits, and longer; NaN in what no program writes is seen."""
    sizes, lengths = [1, 5, 30, 3, 1], [1, 16, 500, 150, 257]
    prefill(Heads(4, 2, 16), sizes, lengths, tiles=SMALL, splits=splits, padding=padding, rows=7)


@runs("dim, group, dtype", [(80, 3, F16), (128, 4, BF16), (256, 1, F32)], on=INTERPRETED, keep=1)
def test_split_prefill_of_other_heads_equals_float64(implementation, dim, group, dtype):
    prefill(Heads(2 * group, 2, dim), [3, 9], [400, 310], dtype, page_size=5, splits=5)


@runs("splits", [1, 2], on=INTERPRETED)
def test_a_row_of_infinite_scores_is_nan_in_any_split(implementation, splits, monkeypatch):
    """A row of bad KV is known by that, and memory that nothing was written to may hold any number."""
    heads, empty = Heads(2, 2, 16), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(7.0))
    batch, q = paged(heads, [520], dtype=F32), queries(heads, 3, dtype=F32).abs()
    batch.cache[batch.page_table[batch.rows[0], 0], LAYER, 0, 5] = float("inf")
    start = torch.tensor([0, 3])
    with np.errstate(invalid="ignore", over="ignore"):
        got = kernels.prefill_attention(
            q,
            batch.cache,
            LAYER,
            batch.page_table,
            batch.scales,
            batch.rows,
            start,
            batch.kv_lens,
            None,
            *Attend(1.0),
            3,
            splits=splits,
        )
    assert got.isnan().all()


@runs(on=INTERPRETED)
def test_a_few_tokens_are_split_by_themselves_and_many_are_not(implementation, monkeypatch):
    seen = []
    monkeypatch.setattr(
        kernels, "split_space", lambda q, splits: seen.append(splits) or splits_triton.split_space(q, splits)
    )
    monkeypatch.setattr(kernels, "arch", lambda device: arch.INTERPRETER._replace(processors=8))
    prefill(Heads(2, 2, 16), [3], [1100], tiles=SMALL)
    prefill(Heads(2, 2, 16), [70], [1100], tiles=SMALL)
    assert seen == [4]


@runs(
    "sizes, lengths", on=INTERPRETED, keep=2,
    interpreter=[
        ([33, 1, 8, 16], [33, 65, 8, 80]), ([1, 1, 1], [1, 40, 33]), ([1], [1]), ([16], [16]), ([17], [17]),
        ([5, 64], [100, 64]),
    ],
)  # fmt: skip
def test_prefill_of_fresh_and_continued_chunks_equals_float64(implementation, sizes, lengths):
    for tiles in (SMALL, AttentionTiles(32, 16, 4, 2)):
        prefill(Heads(2, 1, 16), sizes, lengths, tiles=tiles)


@runs("padding, rows", [(40, 8), (1, 2), (7, 3), (1, 8)], on=INTERPRETED, keep=1)
def test_padding_of_tokens_and_chunks_gives_zeros(implementation, padding, rows):
    prefill(Heads(2, 1, 16), [9, 4], [9, 30], padding=padding, rows=rows, tiles=SMALL)


@runs(on=INTERPRETED)
def test_an_operator_of_attention_is_seen_by_a_dispatch_mode_as_one(implementation):
    heads, scale = Heads(4, 2, 16), 0.25
    batch, q = paged(heads, [20, 33], dtype=F32), queries(heads, 2, dtype=F32)
    want = direct(q, batch, [0, 1], [20, 33], scale)
    starts = torch.tensor([0, 1, 2])
    with Launched() as seen:
        decoded = torch.ops.gapless.triton_decode_attention(q, batch.cache, LAYER, *batch[1:], scale)
        args = (q, batch.cache, LAYER, *batch[1:4], starts, batch.kv_lens, None, *Attend(scale), 1)
        filled = torch.ops.gapless.triton_prefill_attention(*args)
    near(decoded, want)
    near(filled, want)
    assert seen.names == {"decode_attention": 1, "prefill_attention": 1}


@runs(
    "heads, norm, lengths, many", on=INTERPRETED, keep=3,
    interpreter=[
        (Heads(3, 1, 24), True, [1, 17, 70, 33], False), (Heads(4, 2, 16), False, [1, 17, 70, 33], True),
        (Heads(4, 2, 16), True, [1, 17, 70, 33, 49, 90], None), (Heads(3, 1, 24), False, [1, 17, 70, 33], True),
    ],
)  # fmt: skip
def test_decode_rotates_and_writes_first(implementation, heads, norm, lengths, many):
    """Against the rotation's own kernel, and the float64 answer over the cache that it leaves."""
    batch = paged(heads, lengths, dtype=F32)
    turn, scale = unturned(heads, batch, norm), heads.dim**-0.5
    wanted, qkv = batch._replace(cache=batch.cache.clone()), turn.qkv.clone()
    unpack.rope_and_write(rope_triton.rope_and_write)(qkv, turn.rotation, wanted.kv, turn.slots)
    got = kernels.decode_attention(
        turn.qkv[:, : heads.query], batch.cache, LAYER, *batch[1:], scale, tiles=SMALL, splits=3, least=16,
        many=many, unturned=kernels.Unturned(*turn[1:]),
    )  # fmt: skip
    torch.testing.assert_close(batch.cache, wanted.cache, rtol=1e-6, atol=1e-6, equal_nan=True)
    near(got, direct(qkv[:, : heads.query], wanted, list(range(len(lengths))), lengths, scale))


@runs(
    "heads, lengths", on=INTERPRETED, keep=1,
    # The first has more rows and heads than the interpreter's GPU has counters, and one split each.
    interpreter=[
        (Heads(8, 8, 16), [1, 9, 4, 3, 5, 7]), (Heads(4, 2, 16), [1, 17, 70]),
        (Heads(4, 2, 16), [1, 17, 70, 33, 5, 64]),
    ],
)  # fmt: skip
def test_decode_of_few_rows_equals_the_twin(implementation, heads, lengths):
    """Rotated, written and read in one operation."""
    found, attend = [], Attend(heads.dim**-0.5)
    for fused in (True, False):
        batch = paged(heads, lengths, dtype=F32)
        turn = unturned(heads, batch, True)
        rows = LayerRows(turn.slots, batch.batch, batch.cache, batch.page_table)
        if fused:
            ops = few_rows.FewRowsOps(turn.qkv, rows, 0.0)
            out = ops.attend(turn.qkv.flatten(1), turn.rotation, LAYER, attend)
        else:
            plain.rope_and_write(turn.qkv, turn.rotation, batch.kv, turn.slots)
            out = attention.decode_attention(turn.qkv[:, : heads.query], batch.kv, batch.batch, attend)
        found.append((out, batch.cache))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


LIMITS = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}


@runs(
    "heads, lengths",
    on=("cuda",),
    cuda=[
        (heads, lengths)
        for heads in ON_GPU
        for lengths in ([1000], [1, 16, 300, 4097], [700] * 7 + [1, 4097], [*range(40, 2000, 62)])
    ],
)
def test_decode_that_rotates_and_writes_first_equals_two_launches(implementation, heads, lengths):
    """Early it gives the same, also right behind a write of qkv."""
    for dtype, limit in LIMITS.items():
        batch = paged(heads, lengths, dtype=dtype, device="cuda")
        turn, scale = unturned(heads, batch, heads.dim == 128), heads.dim**-0.5
        wanted, qkv = batch._replace(cache=batch.cache.clone()), turn.qkv.clone()
        unpack.rope_and_write(rope_triton.rope_and_write)(qkv, turn.rotation, wanted.kv, turn.slots)
        want = kernels.decode_attention(qkv[:, : heads.query], wanted.cache, LAYER, *batch[1:], scale, early=False)
        found = []
        for early in (False, EARLY, EARLY):
            cache, raw = batch.cache.clone(), turn.qkv * 1
            args = (raw[:, : heads.query], cache, LAYER, *batch[1:], scale)
            found.append(kernels.decode_attention(*args, early=early, unturned=kernels.Unturned(*turn[1:])))
            torch.testing.assert_close(cache, wanted.cache, rtol=limit, atol=limit, equal_nan=True)
        near(found[0], want.double().cpu())
        assert all(torch.equal(one, found[0]) for one in found)


@runs("heads", on=("cuda",), cuda=ON_GPU)
def test_splits_of_real_sizes_equal_float64(implementation, heads):
    lengths, scale, device = [1, 15, 16, 17, 255, 1000, 4097, 1, 300], heads.dim**-0.5, torch.device("cuda")
    for dtype in LIMITS:
        batch, q = paged(heads, lengths, dtype=dtype, device="cuda"), queries(heads, 9, dtype=dtype, device="cuda")
        want, args = direct(q, batch, list(range(9)), lengths, scale), (q, batch.cache, LAYER, *batch[1:], scale)
        for splits in (1, 2, 13):
            near(kernels.decode_attention(*args, splits=splits), want)
            for _ in range(20):
                near(kernels.decode_attention(*args, splits=splits, many=True), want)
        assert not kernels.counters(device, kernels.GRID_PER_SM * kernels.arch(device).processors).any()


@runs("size", on=("cuda",), cuda=[1, 2, 3, 7, 16, 31])
def test_prefill_of_small_chunks_of_real_sizes_equals_float64(implementation, size):
    ends, scale = [size, size + 1, 100, 512, 1025], QWEN.dim**-0.5
    starts, chunk_of, seen = chunked([size] * 5, ends)
    for dtype in LIMITS:
        batch, q = paged(QWEN, ends, dtype=dtype, device="cuda"), queries(QWEN, 5 * size, dtype=dtype, device="cuda")
        start, want = torch.tensor(starts, device="cuda"), direct(q, batch, chunk_of, seen, scale)
        args = (q, batch.cache, LAYER, *batch[1:4], start, batch.kv_lens, None, *Attend(scale), size)
        for splits in (None, 1, 2, 7, 16):
            near(kernels.prefill_attention(*args, **({} if splits is None else {"splits": splits})), want)


@pytest.fixture
def no_host_wait():
    """Called after a warm-up: from there on torch raises at a wait of the host for the device."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@runs("dtype", on=("cuda",), cuda=[*LIMITS])
def test_a_captured_batch_is_replayed_with_other_lengths_rows_and_chunks(implementation, dtype, no_host_wait):
    """Decode rows and chunks of a bucket of 6 rows, 3 chunks and 200 tokens; padding rows and tokens among them."""
    heads, scale, tokens, operators = QWEN, QWEN.dim**-0.5, 200, torch.ops.gapless
    batch = paged(heads, [2000] * 9, dtype=dtype, device="cuda")
    table, rows = batch.page_table, batch.rows.clone()
    lens, ends = batch.kv_lens[:6].clone(), batch.kv_lens[6:].clone()
    starts = torch.tensor([0, 70, 130, 200], device="cuda")
    q, chunk_q = (queries(heads, count, dtype=dtype, device="cuda") for count in (6, tokens))
    decode = (q, batch.cache, LAYER, table, None, rows[:6], lens, scale)
    prefill = (chunk_q, batch.cache, LAYER, table, None, rows[6:], starts, ends, None, *Attend(scale), tokens)

    def program():
        return operators.triton_decode_attention(*decode), operators.triton_prefill_attention(*prefill)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        program()
        program()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        outs = program()
    random = torch.Generator().manual_seed(3)
    for _ in range(20):
        drawn = torch.randint(1, 2001, (6,), generator=random)
        drawn[4:] = 1
        cuts = torch.randint(1, tokens, (3,), generator=random).sort().values
        end = (cuts.diff(prepend=torch.tensor([0])) + torch.randint(0, 1800, (3,), generator=random)).clamp(min=1)
        lens.copy_(drawn)
        ends.copy_(end)
        starts[1:].copy_(cuts)
        rows.copy_(batch.rows[torch.randperm(9, generator=random).to("cuda")])
        torch.cuda.synchronize()
        no_host_wait()
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        for got, want in zip(outs, program(), strict=True):
            near(got, want.double().cpu())


@runs(on=("cuda",))
def test_eager_launches_do_not_wait(implementation, no_host_wait):
    batch, q = paged(QWEN, [700], dtype=BF16, device="cuda"), queries(QWEN, 1, dtype=BF16, device="cuda")
    starts = torch.tensor([0, 1], device="cuda")
    for turn in range(2):
        if turn:
            no_host_wait()
        torch.ops.gapless.triton_decode_attention(q, batch.cache, LAYER, *batch[1:], 1.0)
        torch.ops.gapless.triton_prefill_attention(
            q, batch.cache, LAYER, *batch[1:4], starts, batch.kv_lens, None, *Attend(1.0), 1
        )
