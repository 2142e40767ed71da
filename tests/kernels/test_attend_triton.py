"""Attention of every kind in Triton: in any number of splits, with rotation within it, and the same in any batch."""

from __future__ import annotations

from functools import partial

import pytest
from attend_cases import (
    CAPPED,
    CHUNK,
    GPU_CASES,
    MIXED,
    PLAIN,
    SHORT_CASES,
    SPLIT_CASES,
    WINDOW,
    Case,
    Kind,
    Shape,
    check_decode_case,
    check_prefill_case,
    for_decode,
    near,
)
from implementations import F32, TRITON, runs
from paged import LAYER, Heads, dense, paged, queries, unturned

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from gapless.kernels import attention_triton as kernels
from gapless.kernels import invariant_attention_triton as invariant
from gapless.kernels import rope_triton, splits_triton, unpack
from gapless.kernels.tiles import AttentionTiles

SMALL = AttentionTiles(16, 16, 4, 2)
pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

EVERY_SPLIT = [
    (splits, many, case)
    for splits, many in ((64, True), (7, False), (2, True), (64, False), (1, True), (1, False), (2, False), (7, True))
    for case in SPLIT_CASES
]


@runs(
    "splits, many, case", [EVERY_SPLIT[at] for at in sorted(range(64), key=lambda at: at * 9 % 64)], on=TRITON, keep=4
)
def test_decode_of_every_kind_in_any_number_of_splits_equals_float64(implementation, splits, many, case):
    """Sinks count once, also where most splits have nothing to read."""
    how = {"tiles": SMALL, "least": 16, "splits": splits, "many": many}
    op = unpack.decode_attention(partial(kernels.decode_attention, **how))
    check_decode_case(op, case, F32, implementation.device)


PROMPTS = Shape(Heads(4, 2, 16), 16, (16, 600, 150, 357), (5, 30, 3, 1))
"""Contexts shorter than a tile, than all splits, and longer"""
LONG_KINDS = [
    Kind(WINDOW, 400, 3.0, True), Kind(CHUNK, 320, 0.0, True), Kind(WINDOW, 410, spans=(30, 4)),
    Kind(sinks=True, spans=(60,)), *MIXED, *PLAIN,
]  # fmt: skip


@runs("splits, kind", [(splits, kind) for splits in (5, 2, 16) for kind in LONG_KINDS], on=TRITON, keep=4)
def test_prefill_of_every_kind_in_any_number_of_splits_equals_float64(implementation, splits, kind):
    op = unpack.prefill_attention(partial(kernels.prefill_attention, tiles=SMALL, splits=splits))
    check_prefill_case(op, Case(kind, PROMPTS), F32, implementation.device)


@runs("kind, many", [(kind, many) for many in (True, False) for kind in (*MIXED, *CAPPED, *PLAIN)], on=TRITON, keep=3)
def test_decode_of_every_kind_rotates_and_writes_first(implementation, kind, many):
    heads = Heads(6, 2, 96)
    given = for_decode(Case(kind, Shape(heads, lengths=(1, 17, 70, 33, 49, 90))), F32, implementation.device)
    turn, made = unturned(heads, given.made, True), given.made
    wanted, qkv = made._replace(cache=made.cache.clone()), turn.qkv.clone()
    unpack.rope_and_write(rope_triton.rope_and_write)(qkv, turn.rotation, wanted.kv, turn.slots)
    got = kernels.decode_attention(
        turn.qkv[:, : heads.query], made.cache, LAYER, *made[1:], *given.attend, tiles=SMALL, splits=3, least=16,
        many=many, unturned=kernels.Unturned(*turn[1:]),
    )  # fmt: skip
    near(got, dense(qkv[:, : heads.query], wanted, given.row_of, given.ranges, given.attend))


@runs("kind, parts", [(Kind(WINDOW, 64), 4), (Kind(CHUNK, 512), 2)], on=("interpreter",))
def test_splits_share_what_a_row_reads_and_not_its_length(implementation, kind, parts, monkeypatch):
    spaces = []
    monkeypatch.setattr(
        kernels, "split_space", lambda *given: spaces.append(splits_triton.split_space(*given)) or spaces[-1]
    )
    heads, lengths = Heads(1, 1, 16), [544, 544]
    batch, q = paged(heads, lengths, dtype=F32), queries(heads, 2, dtype=F32)
    how = {"tiles": SMALL, "least": 16, "splits": 4, "per_sm": 64}
    kernels.decode_attention(q, batch.cache, LAYER, *batch[1:], *kind.attend(heads), **how)
    assert spaces[0][1].view(2, 4).isfinite().sum(1).tolist() == [parts, parts]


@runs(on=("interpreter",))
def test_the_most_splits_of_a_row_follow_from_its_window(implementation):
    assert [splits_triton.most_read(32768, *reach) for reach in ((0, 0), (1, 4096), (2, 1024), (1, 10**6))] == [
        32768, 4096, 1024, 32768,
    ]  # fmt: skip


@runs("case", on=TRITON, interpreter=SHORT_CASES, cuda=GPU_CASES, keep=8)
def test_invariant_attention_of_every_kind_equals_float64(implementation, case, monkeypatch):
    """In the interpreter in segments of 16 entries and more."""
    how = {}
    if implementation.name == "interpreter":
        how = {"tiles": SMALL}
        monkeypatch.setattr(invariant, "LEAST_IN_SEGMENT", 16)
        monkeypatch.setattr(invariant, "MOST_SEGMENTS", 4)
    for shares in (1, 3):
        op = unpack.decode_attention(partial(invariant.invariant_decode, shares=shares, **how))
        check_decode_case(op, case, F32, implementation.device)
    op = unpack.prefill_attention(partial(invariant.invariant_prefill, **how))
    check_prefill_case(op, case, F32, implementation.device)
