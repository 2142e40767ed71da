"""KV in fewer bits in Triton: in any number of splits, in any batch, and written and read in one launch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attend_cases import PLAIN, SHORT_CASES, SPLIT_CASES, Case, Shape, for_decode, for_prefill, near
from implementations import F32, TRITON, runs
from kv_cases import FORMATS, decoded, e4m3_values, given_in, in_format
from paged import LAYER, Heads, dense, paged, unturned

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import triton
import triton.language as tl

from gapless.kernels import attention_triton, few_rows, plain, rope_triton, unpack
from gapless.kernels import invariant_attention_triton as invariant
from gapless.kernels.kv import KVFormat
from gapless.kernels.kv_triton import from_e4m3
from gapless.kernels.tiles import AttentionTiles
from gapless.kernels.views import LayerRows

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
SMALL = AttentionTiles(16, 16, 4, 2)


@triton.jit
def _decoded_kernel(codes, out):
    at = tl.arange(0, 256)
    tl.store(out + at, from_e4m3(tl.load(codes + at), tl.float32))


@runs(on=TRITON)
def test_every_code_of_e4m3_is_its_number(implementation):
    """By whole numbers in the interpreter, as on AMD's GPUs, whose own format has half of these numbers."""
    codes = torch.arange(256).to(torch.uint8).to(implementation.device)
    out = torch.empty(256, device=implementation.device)
    _decoded_kernel[(1,)](codes, out)
    assert torch.equal(out.cpu().double().nan_to_num(7), e4m3_values().nan_to_num(7))


@runs("kind, splits, many, case", [
    (kind, splits, many, case) for splits, many in ((7, False), (3, True), (64, True)) for case in SPLIT_CASES[::3]
    for kind in FORMATS
], on=TRITON, keep=6)  # fmt: skip
def test_splits_over_fewer_bits_equal_float64(implementation, kind, splits, many, case):

    how = {"tiles": SMALL, "least": 16, "splits": splits, "many": many}
    given, wanted = given_in(for_decode(case, F32, implementation.device), kind)
    op = unpack.decode_attention(partial(attention_triton.decode_attention, **how))
    near(op(given.q, given.made.kv, given.batch, given.attend), wanted)
    prompt = Case(case.kind, Shape(Heads(4, 2, 16), 16, (16, 600, 150, 357), (5, 30, 3, 1)))
    given, wanted = given_in(for_prefill(prompt, F32, implementation.device), kind)
    op = unpack.prefill_attention(partial(attention_triton.prefill_attention, tiles=how["tiles"], splits=splits % 63))
    near(op(given.q, given.made.kv, given.batch, given.attend, 30)[: len(given.ranges)], wanted)


@runs("kind, case", [(kind, case) for case in SHORT_CASES[::3] for kind in FORMATS], on=TRITON, keep=6)
def test_invariant_attention_over_fewer_bits_equals_float64(implementation, kind, case, monkeypatch):

    if kind is KVFormat.K8V4 and case.shape.page_size * case.shape.heads.kv * case.shape.heads.dim % 8:
        pytest.skip("k8v4 has no such pages")
    how = {}
    if implementation.name == "interpreter":
        how = {"tiles": SMALL}
        monkeypatch.setattr(invariant, "LEAST_IN_SEGMENT", 16)
        monkeypatch.setattr(invariant, "MOST_SEGMENTS", 4)
    for shares in (1, 3):
        given, wanted = given_in(for_decode(case, F32, implementation.device), kind)
        op = unpack.decode_attention(partial(invariant.invariant_decode, shares=shares, **how))
        near(op(given.q, given.made.kv, given.batch, given.attend), wanted)
    given, wanted = given_in(for_prefill(case, F32, implementation.device), kind)
    op = unpack.prefill_attention(partial(invariant.invariant_prefill, **how))
    near(op(given.q, given.made.kv, given.batch, given.attend, max(case.shape.sizes))[: len(given.ranges)], wanted)


@runs("kind, heads, many, norm", [
    (kind, heads, many, norm) for kind in FORMATS
    for heads, many, norm in (
        (Heads(6, 2, 96), False, True), (Heads(4, 2, 16), True, False), (Heads(3, 1, 24), True, True)
    )
], on=TRITON, keep=4)  # fmt: skip
def test_fused_decode_writes_and_reads_fewer_bits(implementation, kind, heads, many, norm):
    """The entry that it writes is the one of the write alone, to the bit unless a norm sums in another order."""
    lengths, device = [1, 17, 70, 33, 49, 90], implementation.device
    made, _ = in_format(paged(heads, lengths, dtype=F32, device=device), kind)
    exact = paged(heads, lengths, dtype=F32, device=device)
    turn, wanted = unturned(heads, exact, norm), made._replace(cache=made.cache.clone())
    qkv = turn.qkv.clone()
    unpack.rope_and_write(rope_triton.rope_and_write)(qkv, turn.rotation, wanted.kv, turn.slots)
    got = attention_triton.decode_attention(
        turn.qkv[:, : heads.query], made.cache, LAYER, *made[1:], 0.3, tiles=SMALL, splits=3,
        least=16, many=many, unturned=attention_triton.Unturned(*turn[1:]),
    )  # fmt: skip
    mine, theirs = (batch.cache.view(torch.uint8)[1:] for batch in (made, wanted))
    assert (mine != theirs).sum() <= (4 if norm else 0)
    read = made._replace(cache=decoded(made.cache, heads.dim).to(device))
    attend = for_decode(Case(PLAIN[1], Shape(heads, lengths=tuple(lengths))), F32, device).attend
    near(got, dense(qkv[:, : heads.query], read, [*range(6)], [(0, n) for n in lengths], attend))


@runs("kind", FORMATS, on=TRITON)
def test_few_rows_over_fewer_bits_equal_the_reference(implementation, kind):
    heads, lengths, device = Heads(4, 2, 16), [1, 17, 70], implementation.device
    attend = PLAIN[0].attend(heads, device)
    exact = paged(heads, lengths, dtype=F32, device=device)
    turn, found = unturned(heads, exact, False), []
    for apart in (True, False):
        made, _ = in_format(exact, kind)
        rows = LayerRows(turn.slots, made.batch, made.cache, made.page_table, apart=apart, scales=made.scales)
        ops = few_rows.FewRowsOps(turn.qkv, rows, 0.0)
        found.append((ops.attend(turn.qkv.clone().flatten(1), turn.rotation, LAYER, attend), made.cache))
    made, _ = in_format(exact, kind)
    qkv = turn.qkv.clone()
    plain.rope_and_write(qkv, turn.rotation, made.kv, turn.slots)
    want = plain.KERNELS.decode_attention(qkv[:, : heads.query], made.kv, made.batch, attend)
    for out, cache in found:
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        assert (cache.view(torch.uint8)[1:] != made.cache.view(torch.uint8)[1:]).sum() <= 2
