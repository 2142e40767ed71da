"""The C++ kernels over KV in fewer bits: what is written for every number, and the bits of rows in any batch."""

from __future__ import annotations

import pytest
import torch
from kernels.attend_cases import MIXED, PLAIN, SHORT_CASES, Case, Shape, for_decode, for_prefill, near
from kernels.kv_cases import FORMATS, given_in, in_format
from kernels.native_kernels import check_threads, load_native, load_plain_variant
from kernels.paged import LAYER, Heads, paged, queries
from kernels.test_attention import CHUNKS, LENGTHS
from sharpest import sharpest

from gapless.kernels import native, unpack
from gapless.kernels.kv import KVFormat, KVLayout, to_e4m3, write
from gapless.kernels.native import NATIVE_DTYPES
from gapless.kernels.views import KV, Attend, Reach, Rotation, RowBatch

BF16 = torch.bfloat16
TABLE = torch.empty(0, dtype=torch.int32)
SHAPES = [
    Shape(Heads(3, 1, 80), 16), Shape(Heads(4, 2, 16), 16), Shape(Heads(7, 1, 128), 16, LENGTHS, CHUNKS),
    Shape(Heads(4, 2, 96), 8), Shape(Heads(2, 1, 256), 32), Shape(Heads(2, 2, 64), 128, LENGTHS, CHUNKS),
    Shape(Heads(5, 1, 192), 4), Shape(Heads(3, 1, 20), 2), Shape(Heads(2, 1, 34), 4), Shape(Heads(1, 1, 320), 16),
]  # fmt: skip
"""Heads around a register of bytes and of nibbles, and one that prompts attend as decode rows do"""
CASES = [Case(kind, shape) for shape in SHAPES for kind in (PLAIN[-1], *MIXED[2:])]


def unturned(keys, scale, stored, page_size=8):
    """The memory after keys [T, 1, D], and the same as values, were written to the slots from 0 on; unrotated."""
    tokens, _, dim = keys.shape
    layout = KVLayout(stored, 1, dim, keys.dtype)
    raw = torch.zeros(-(-tokens // page_size), LAYER + 1, layout.layer_bytes(page_size), dtype=torch.uint8)
    cache = raw.view(layout.stored).view(layout.shape(len(raw), LAYER + 1, page_size))
    angles = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), 1).expand(tokens, dim)
    kv = KV(cache, LAYER, TABLE, torch.full((LAYER + 1, 2), scale))
    qkv = torch.cat((keys, keys, keys), 1)
    load_native().rope_and_write(qkv, Rotation(None, 1e-6, angles), kv, torch.arange(tokens))
    return kv


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.5, 0.3, 64.0])
def test_every_bfloat16_is_written_as_by_torch(scale):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(BF16)
    values = unturned(every.view(-1, 1, 64), scale, KVFormat.FP8).cache[:, LAYER, 1]
    found, wanted = (x.reshape(-1).view(torch.uint8) for x in (values, to_e4m3(every, torch.tensor(scale))))
    wild = every.isnan()
    assert torch.equal(found[~wild], wanted[~wild])
    assert (found[wild] & 127 == 127).all()


@pytest.mark.parametrize("dim", [2, 16, 20, 34, 64, 80, 128])
def test_values_of_every_size_are_written_as_by_the_reference(dim):
    """Flat and nearly flat ones, subnormal steps, an infinite step, infinity and NaN."""
    random = torch.Generator().manual_seed(7)
    values = torch.randn(32, 1, dim, generator=random) * torch.logspace(-9, 6, 32).view(-1, 1, 1)
    values[0], values[1], values[2, 0, 0], values[3, 0, -1] = 2.5, 100, 1e38, torch.nan
    values[1, 0, 0], values[4, 0, 0], values[5, 0, 0] = 100.01, torch.inf, -torch.inf
    values[6] += 300
    for dtype in NATIVE_DTYPES:
        own = values.to(dtype)
        kv = unturned(own, 0.5, KVFormat.K8V4)
        want = kv._replace(cache=torch.zeros_like(kv.cache))
        write(want, torch.arange(32), own, own)
        found, wanted = (memory.cache.flatten(2)[:, LAYER].split([8 * dim, 4 * dim, 32], 1) for memory in (kv, want))
        assert torch.equal(found[1], wanted[1])
        mine, reference = (x.reshape(32, 4).contiguous().view(torch.float16) for x in (found[2], wanted[2]))
        torch.testing.assert_close(mine, reference, rtol=0, atol=0, equal_nan=True)  # a zero may have either sign
        assert mine[3].isnan().all() and not found[1].reshape(32, -1)[3].any()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("case", sharpest(CASES, 12), ids=str)
def test_attention_over_fewer_bits_equals_float64_for_heads_of_any_size(case, stored):
    for kernels in (load_native(), native.invariant(load_native())):
        check(kernels.decode_attention, kernels.prefill_attention, case, stored)


def check(decode, prefill, case, stored, dtypes=NATIVE_DTYPES):
    for dtype in dtypes:
        given, wanted = given_in(for_decode(case, dtype), stored)
        near(decode(given.q, given.made.kv, given.batch, given.attend), wanted)
        given, wanted = given_in(for_prefill(case, dtype), stored)
        got = prefill(given.q, given.made.kv, given.batch, given.attend, max(case.shape.sizes))
        near(got[: len(given.ranges)], wanted)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_a_byte_that_is_no_number_reaches_its_readers_alone(dtype, stored):
    heads, kernels = Heads(4, 2, 64), load_native()
    made, _ = in_format(paged(heads, [70, 40], dtype=dtype), stored)
    q, wild = queries(heads, 110, dtype=dtype), made.cache.clone().view(torch.uint8)
    page = made.page_table[made.rows[0], 3]
    wild[page, LAYER].view(-1)[5 * 2 * 64 + 7] = 127  # entry 53, of head 0
    batch = RowBatch(made.rows, made.kv_lens, torch.tensor([0, 70, 110]))
    memories = made.kv, made.kv._replace(cache=wild.view(made.cache.dtype))
    clean, got = (kernels.prefill_attention(q, kv, batch, Attend(0.125), 70).view(110, 4, 64) for kv in memories)
    assert got[53:70, :2].isnan().all()
    assert torch.equal(got[:53], clean[:53]) and torch.equal(got[70:], clean[70:])
    assert torch.equal(got[53:70, 2:], clean[53:70, 2:])
    rows = kernels.decode_attention(q[:2], memories[1], made.batch, Attend(0.125))
    assert rows[0, :128].isnan().all() and rows[0, 128:].isfinite().all() and rows[1].isfinite().all()


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("heads", sharpest([Heads(7, 1, 80), Heads(4, 2, 128), Heads(1, 1, 64)], 2))
def test_rows_over_fewer_bits_have_the_same_bits_in_any_batch(heads, stored):
    """Prompts cut anywhere, threads; invariant prompts have those of decode rows."""
    length, kernels = 700, load_native()
    attend = Attend(heads.dim**-0.5, Reach.WINDOW, 530, 3.0, torch.linspace(-2, 7, heads.query))
    for dtype in NATIVE_DTYPES:
        made, _ = in_format(paged(heads, [length, 40], dtype=dtype), stored)
        one, q = made.rows[:1], queries(heads, length, dtype=dtype)

        def prompt(kernels, low, high, made=made, one=one, q=q):
            batch = RowBatch(one, torch.tensor([high]), torch.tensor([0, high - low]))
            return kernels.prefill_attention(q[low:high], made.kv, batch, attend, high - low)

        for some in (kernels, native.invariant(kernels)):
            whole = prompt(some, 0, length)
            for cut in (1, 65, 512, 531):
                assert torch.equal(torch.cat((prompt(some, 0, cut), prompt(some, cut, length))), whole)
        places = [0, 5, 63, 64, 65, 511, 512, 513, 529, 530, 531, 699]
        rows = RowBatch(one.repeat(len(places)), torch.tensor(places) + 1)
        assert torch.equal(kernels.decode_attention(q[places], made.kv, rows, attend), whole[places])
        check_threads(lambda x, made=made, rows=rows: kernels.decode_attention(x, made.kv, rows, attend), q[places])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_e4m3_has_the_bits_of_the_same_numbers_in_the_models_dtype(dtype):
    """Scales are powers of two, so that nothing else is rounded."""
    heads, kernels = Heads(4, 2, 80), load_native()
    made, plain = in_format(paged(heads, LENGTHS, dtype=dtype), KVFormat.FP8)
    plain = plain._replace(cache=plain.cache.to(dtype), scales=None)
    q = queries(heads, sum(CHUNKS), dtype=dtype)
    prompts = made.batch._replace(starts=torch.tensor([0, *CHUNKS]).cumsum(0))
    for some in (kernels, native.invariant(kernels)):
        ours, theirs = (some.prefill_attention(q, batch.kv, prompts, Attend(0.125), 200) for batch in (made, plain))
        assert torch.equal(ours, theirs)
    ours, theirs = (kernels.decode_attention(q[:9], batch.kv, made.batch, Attend(0.125)) for batch in (made, plain))
    assert torch.equal(ours, theirs)


@pytest.mark.process
def test_fewer_bits_without_avx_512_equal_float64(tmp_path):
    ops = load_plain_variant(tmp_path)
    decode, prefill = unpack.decode_attention(ops.decode_attention), unpack.prefill_attention(ops.prefill_attention)
    for stored in FORMATS:
        for case in [*CASES, *SHORT_CASES[::5]]:
            if case.shape.page_size * case.shape.heads.kv * case.shape.heads.dim % 8 == 0:
                check(decode, prefill, case, stored, (BF16, torch.float32))
