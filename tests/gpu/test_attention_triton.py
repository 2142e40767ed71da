"""The Triton attention kernels on a GPU against plain torch, eagerly and in captured graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from paged import LAYER, Heads, chunked, paged, queries, unturned

from gapless.kernels import attention as reference
from gapless.kernels import unpack
from gapless.kernels.views import KV, RowBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]

kernels = pytest.importorskip("gapless.kernels.attention_triton", reason="needs triton: torch's CUDA builds bring it")
rope_triton = pytest.importorskip("gapless.kernels.rope_triton", reason="needs triton: torch's CUDA builds bring it")

CUDA = "cuda"
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EARLY = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DTYPES = pytest.mark.parametrize("dtype", tuple(LIMITS), ids=str)
QWEN = Heads(16, 8, 128)
SHAPES = (
    QWEN,
    Heads(32, 8, 128),
    Heads(28, 4, 128),
    Heads(8, 2, 64),
    Heads(4, 4, 80),
    Heads(6, 2, 96),
    Heads(8, 1, 256),
)
LENGTHS = [1, 15, 16, 17, 255, 1000, 4097, 1, 300]
SIZES, ENDS = [1, 300, 16, 5, 129, 64], [1, 300, 700, 2049, 129, 65]


def check(got, want):
    """Both in the same dtype; the reference computes in float32."""
    assert got.isfinite().all()
    assert (got.float() - want.float()).abs().max() < LIMITS[got.dtype]


def decode_reference(q, cache, layer, table, rows, kv_lens, scale):
    return reference.decode_attention(q, KV(cache, layer, table), RowBatch(rows, kv_lens), scale)


def prefill_reference(q, cache, layer, table, rows, starts, kv_lens, scale, max_query):
    return reference.prefill_attention(q, KV(cache, layer, table), RowBatch(rows, kv_lens, starts), scale, max_query)


@pytest.fixture
def no_host_wait():
    """Called after a warm-up: from there on torch raises where the host would wait for the device."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@DTYPES
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize(
    "lengths", ([1000], [1, 16, 300, 4097], [700] * 7 + [1, 4097], list(range(40, 2000, 62))), ids=len
)
def test_decode_that_rotates_and_writes_first(heads, lengths, dtype):
    """Against the two launches that it stands for; early it gives the same, also right behind a write of qkv."""
    batch = paged(heads, lengths, dtype=dtype, device=CUDA)
    turn, scale = unturned(heads, batch, heads.dim == 128), heads.dim**-0.5
    wanted, qkv = batch._replace(cache=batch.cache.clone()), turn.qkv.clone()
    unpack.rope_and_write(rope_triton.rope_and_write)(qkv, turn.rotation, wanted.kv, turn.tokens)
    want = kernels.decode_attention(qkv[:, : heads.query], wanted.cache, LAYER, *batch[1:], scale, early=False)
    found = []
    for early in (False, EARLY, EARLY):
        cache = batch.cache.clone()
        raw = turn.qkv * 1
        args = (raw[:, : heads.query], cache, LAYER, *batch[1:], scale)
        found.append(kernels.decode_attention(*args, early=early, unturned=kernels.Unturned(*turn[1:])))
        limit = LIMITS[dtype]
        torch.testing.assert_close(cache, wanted.cache, rtol=limit, atol=limit, equal_nan=True)
    check(found[0], want)
    assert all(torch.equal(one, found[0]) for one in found)


@DTYPES
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_decode_attention_equals_the_reference(heads, dtype):
    batch = paged(heads, LENGTHS, dtype=dtype, device=CUDA)
    args = (queries(heads, len(LENGTHS), dtype=dtype, device=CUDA), batch.cache, LAYER, *batch[1:], heads.dim**-0.5)
    want = decode_reference(*args)
    check(torch.ops.gapless.triton_decode_attention(*args), want)
    for splits in (1, 2, 13):
        check(kernels.decode_attention(*args, splits=splits), want)
        for _ in range(20):
            check(kernels.decode_attention(*args, splits=splits, many=True), want)
    assert not kernels.counters(
        batch.cache.device, kernels.GRID_PER_SM * kernels.multiprocessors(batch.cache.device)
    ).any()


@DTYPES
@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize("most", (300, 10_000))
def test_prefill_attention_equals_the_reference(heads, dtype, most):
    starts, _, _ = chunked(SIZES, ENDS)
    batch = paged(heads, ENDS, dtype=dtype, device=CUDA)
    q = queries(heads, starts[-1] + 37, dtype=dtype, device=CUDA)
    start = torch.tensor(starts, device=CUDA)
    args = (q, batch.cache, LAYER, batch.page_table, batch.rows, start, batch.kv_lens, heads.dim**-0.5, most)
    check(torch.ops.gapless.triton_prefill_attention(*args), prefill_reference(*args))


@DTYPES
@pytest.mark.parametrize("size", (1, 2, 3, 7, 16, 31))
def test_prefill_of_small_chunks_equals_the_reference(size, dtype):
    heads, sizes, ends = QWEN, [size] * 5, [size, size + 1, 100, 512, 1025]
    batch = paged(heads, ends, dtype=dtype, device=CUDA)
    start = torch.tensor(chunked(sizes, ends)[0], device=CUDA)
    q = queries(heads, 5 * size, dtype=dtype, device=CUDA)
    args = (q, batch.cache, LAYER, batch.page_table, batch.rows, start, batch.kv_lens, heads.dim**-0.5, size)
    want = prefill_reference(*args)
    check(torch.ops.gapless.triton_prefill_attention(*args), want)
    for splits in (1, 2, 7, 16):
        check(kernels.prefill_attention(*args, splits=splits), want)


@pytest.mark.parametrize("page_size", (5, 8, 32, 128))
def test_attention_over_other_page_sizes_equals_the_reference(page_size):
    batch = paged(QWEN, LENGTHS, page_size=page_size, dtype=torch.bfloat16, device=CUDA)
    q = queries(QWEN, len(LENGTHS), dtype=torch.bfloat16, device=CUDA)
    args = (q, batch.cache, LAYER, *batch[1:], QWEN.dim**-0.5)
    check(torch.ops.gapless.triton_decode_attention(*args), decode_reference(*args))


@DTYPES
def test_a_captured_batch_is_replayed_with_other_lengths_rows_and_chunks(dtype, no_host_wait):
    """Decode rows and chunks of a bucket of 6 rows, 3 chunks and 200 tokens; padding rows and tokens among them."""
    heads, scale, tokens = QWEN, QWEN.dim**-0.5, 200
    batch = paged(heads, [2000] * 9, dtype=dtype, device=CUDA)
    table, rows = batch.page_table, batch.rows.clone()
    lens, ends = batch.kv_lens[:6].clone(), batch.kv_lens[6:].clone()
    starts = torch.tensor([0, 70, 130, 200], device=CUDA)
    q, chunk_q = queries(heads, 6, dtype=dtype, device=CUDA), queries(heads, tokens, dtype=dtype, device=CUDA)
    decode = (q, batch.cache, LAYER, table, rows[:6], lens, scale)
    prefill = (chunk_q, batch.cache, LAYER, table, rows[6:], starts, ends, scale, tokens)

    def program():
        operators = torch.ops.gapless
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
        rows.copy_(batch.rows[torch.randperm(9, generator=random).to(CUDA)])
        torch.cuda.synchronize()
        no_host_wait()
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        for got, want in zip(outs, (decode_reference(*decode), prefill_reference(*prefill)), strict=True):
            check(got, want)


def test_eager_launches_do_not_wait(no_host_wait):
    batch, q = (
        paged(QWEN, [700], dtype=torch.bfloat16, device=CUDA),
        queries(QWEN, 1, dtype=torch.bfloat16, device=CUDA),
    )
    starts = torch.tensor([0, 1], device=CUDA)
    for turn in range(2):
        if turn:
            no_host_wait()
        torch.ops.gapless.triton_decode_attention(q, batch.cache, LAYER, *batch[1:], 1.0)
        torch.ops.gapless.triton_prefill_attention(
            q, batch.cache, LAYER, batch.page_table, batch.rows, starts, batch.kv_lens, 1.0, 1
        )
