"""Attention in plain torch against a direct computation in float64."""

from __future__ import annotations

import pytest
import torch
from paged import Heads, chunked, direct, paged, queries

from gapless.kernels import attention

HEADS = Heads(6, 2, 20)


@pytest.mark.parametrize("lengths", ([1], [16, 17, 1, 50], [5, 48]), ids=str)
def test_decode_equals_the_direct_computation(lengths):
    batch, q = paged(HEADS, lengths, dtype=torch.float32), queries(HEADS, len(lengths), dtype=torch.float32)
    got = attention.decode_attention(q, batch.kv, batch.batch, 0.3)
    torch.testing.assert_close(
        got.double(), direct(q, batch, list(range(len(lengths))), lengths, 0.3), rtol=0, atol=3e-6
    )


@pytest.mark.parametrize("padding", (0, 3))
@pytest.mark.parametrize(("sizes", "ends"), (([1], [1]), ([70, 1, 0, 16], [70, 40, 5, 33])), ids=str)
def test_prefill_equals_the_direct_computation(sizes, ends, padding):
    starts, chunk_of, seen = chunked(sizes, ends)
    batch = paged(HEADS, ends, dtype=torch.float32)
    q = queries(HEADS, starts[-1] + padding, dtype=torch.float32)
    chunks = batch.batch._replace(starts=torch.tensor(starts))
    got = attention.prefill_attention(q, batch.kv, chunks, 0.3, max(sizes))
    want = direct(q[: starts[-1]], batch, chunk_of, seen, 0.3)
    torch.testing.assert_close(got.double(), torch.cat([want, torch.zeros(padding, want.shape[1])]), rtol=0, atol=3e-6)
