"""Attention of every kind, against dense softmax in float64: reach, softcap, sinks, spans, scale."""

from __future__ import annotations

import itertools

import pytest
import torch
from attend_cases import (
    CPU_CASES,
    CUT,
    EDGES,
    GPU_CASES,
    KINDS,
    LONG,
    SHORT_CASES,
    SPANS,
    SPLIT_CASES,
    WINDOWS,
    Case,
    check_decode_case,
    check_edges,
    check_prefill_case,
    cut_everywhere,
    for_decode,
    for_prefill,
)
from implementations import BF16, EVERY, F32, runs
from sharpest import sharpest

from gapless.kernels import attention
from gapless.kernels.views import RowBatch

HONOURED_BY = EVERY
"""The implementations that compute every kind"""


@runs("case", on=HONOURED_BY, cpu=CPU_CASES, interpreter=SHORT_CASES, cuda=GPU_CASES, keep=12)
def test_attention_of_every_kind_equals_float64(implementation, case):
    for dtype in implementation.dtypes:
        check_decode_case(implementation.kernels.decode_attention, case, dtype, implementation.device)
        check_prefill_case(implementation.kernels.prefill_attention, case, dtype, implementation.device)


@pytest.mark.parametrize("case", sharpest(CPU_CASES, 12, whole=True), ids=str)
def test_chunks_with_bounds_of_the_host_equal_float64(case, monkeypatch):
    """Each alone, gathered and attended in tiles; the decode rows in groups."""
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", 20_000)
    monkeypatch.setattr(attention, "QUERY_TILE", 32)

    def chunks(q, kv, batch, attend, most):
        parts, starts = [], batch.starts.tolist()
        for row, (low, high) in enumerate(itertools.pairwise(starts)):
            one = RowBatch(batch.rows[row : row + 1], batch.kv_lens[row : row + 1])
            one = one if batch.spans is None else one._replace(spans=batch.spans[low:high])
            start = case.shape.lengths[row] - (high - low)
            parts.append(attention.chunk_attention(q[low:high], kv, one, attend, start))
        return torch.cat(parts)

    for dtype in (F32, BF16):
        check_prefill_case(chunks, case, dtype)
        check_decode_case(attention.decode_attention, case, dtype)


@pytest.mark.parametrize("kind", [WINDOWS[0], CUT[0]], ids=str)
def test_a_window_gathers_no_page_that_it_does_not_reach(kind, monkeypatch):
    """Nor does a chunk's tile score keys outside what its queries read."""
    widths, weigh = [], attention.weigh
    monkeypatch.setattr(attention, "weigh", lambda q, k, *more: widths.append(k.shape[-2]) or weigh(q, k, *more))
    given = for_decode(Case(kind, LONG[0]), F32)
    attention.decode_attention(given.q, given.made.kv, given.batch, given.attend)
    given = for_prefill(Case(kind, LONG[0]._replace(lengths=(1030,), sizes=(7,))), F32, padding=0)
    attention.chunk_attention(given.q, given.made.kv, given.batch._replace(starts=None), given.attend, 1023)
    assert len(widths) == 2
    assert widths[0] == 2 * 16
    assert widths[1] == len(set(range(1023, 1030)) | {at for pair in given.ranges for at in range(*pair)})


@runs("case", SPLIT_CASES, on=HONOURED_BY, keep=2)
def test_sinks_count_once_when_splits_have_nothing_to_read(implementation, case):
    check_decode_case(implementation.kernels.decode_attention, case, F32, implementation.device)


@runs("kind, length", EDGES, on=HONOURED_BY, keep=4)
def test_a_large_value_counts_inside_the_reach_and_not_outside_it(implementation, kind, length):
    for dtype in implementation.dtypes:
        check_edges(implementation.kernels.decode_attention, kind, length, dtype, implementation.device)


@runs("kind", [SPANS[2], SPANS[0], SPANS[1], WINDOWS[0], CUT[0]], on=HONOURED_BY, keep=1)
def test_a_prompt_cut_anywhere_equals_float64(implementation, kind):
    """Spans longer than the window too, which begin before the chunk, in it, and end after it."""
    for case, _ in cut_everywhere(kind, 41):
        check_prefill_case(implementation.kernels.prefill_attention, case, F32, implementation.device)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ranges_of_queries_equal_the_masks_of_transformers(kind):
    masks = pytest.importorskip("transformers.masking_utils", reason="needs transformers, the oracle of its masks")
    length = 90
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    reach = {
        "CAUSAL": lambda: masks.causal_mask_function,
        "WINDOW": lambda: masks.sliding_window_causal_mask_function(kind.size),
        "CHUNK": lambda: masks.chunked_causal_mask_function(kind.size, torch.zeros(1, dtype=torch.long)),
    }[kind.reach.name]()
    block = torch.tensor([first if end - first > 1 else -1 for first, end in kind.spans_of(length)])[None]
    both = masks.or_masks(reach, masks.blockwise_overlay(block)) if kind.spans else reach
    read = torch.zeros(length, length, dtype=torch.bool)
    for at, (first, end) in enumerate(kind.ranges(0, length)):
        read[at, first:end] = True
    assert torch.equal(read, both(0, 0, row, column) & torch.ones_like(read))
