"""KV in fewer bits: what is stored, to the bit, and attention over it, against written-out formulas in float64."""

from __future__ import annotations

import pytest
import torch
from attend_cases import GPU_CASES, MIXED, PLAIN, SHORT_CASES, Case, Shape, for_decode, for_prefill, near
from implementations import F32, runs
from kv_cases import FORMATS, SCALES, decoded, e4m3_values, given_in
from paged import LAYER, Heads
from products import random

from gapless.base.errors import ConfigError
from gapless.kernels import kv
from gapless.kernels.attention import chunk_attention
from gapless.kernels.kv import KVFormat, KVLayout, from_nibbles, scales_of, to_e4m3, to_nibbles
from gapless.kernels.views import KV, Rotation, RowBatch

HEADS = [Heads(4, 2, 16), Heads(3, 1, 80), Heads(7, 1, 128), Heads(2, 1, 256), Heads(2, 2, 64)]
SMALL_CASES = [Case(kind, Shape(Heads(4, 2, 16))) for kind in (*MIXED[:3], PLAIN[0])]


def wide_numbers() -> torch.Tensor:
    """Numbers of every size, the ones between two of e4m3, and both sides of them."""
    stored = e4m3_values()
    sorted_ = stored[stored.isfinite()].unique()
    between = (sorted_[1:] + sorted_[:-1]) / 2
    own = torch.cat((sorted_, between, between * (1 + 2.0**-20), between * (1 - 2.0**-20)))
    return torch.cat((own, torch.tensor([449.0, 464.0, 465.0, 1e9, -1e9, 1e-30, 0.0, -0.0], dtype=own.dtype))).float()


def test_e4m3_is_the_nearest_number_and_the_even_one_of_two():
    numbers, stored = wide_numbers(), e4m3_values()
    found = to_e4m3(numbers, torch.tensor(1.0)).view(torch.uint8).long()
    finite = stored[:127]  # ascending; a code is even if its last bit is
    sizes = numbers.abs().double().clamp(max=448)
    distance = (sizes[:, None] - finite).abs()
    nearest = distance == distance.min(1, keepdim=True).values
    even = torch.arange(127) % 2 == 0
    best = torch.where((nearest.sum(1) > 1)[:, None], nearest & even, nearest).double().argmax(1)
    assert torch.equal(found & 127, best)
    assert to_e4m3(torch.tensor([torch.nan]), torch.tensor(1.0)).isnan().all()
    assert torch.equal(to_e4m3(numbers / 4, torch.tensor(0.25)).view(torch.uint8).long(), found)


def test_nibbles_follow_their_formula():
    values = random((50, 3, 16), F32, "cpu", 1, 3.0)
    values[0] = 2.5  # all the same
    values[1, 0, 3] = torch.nan
    values[2, 0, :2] = torch.tensor([3e38, -3e38])
    nibbles, pair = to_nibbles(values)
    for at, value in zip(pair.view(-1, 2).double(), values.view(-1, 16).double(), strict=True):
        spread = ((value.max() - value.min()).float() / 15).clamp(max=65504)
        wanted = torch.stack((spread, value.min().clamp(-65504).float())).half().double()
        assert torch.equal(at.nan_to_num(7), wanted.nan_to_num(7))
    back = from_nibbles(nibbles, pair).double()
    step = pair[..., :1].double()
    good = torch.ones(50, dtype=torch.bool).index_fill_(0, torch.tensor([1, 2]), False)
    assert ((back - values.double()).abs() <= 0.5001 * step + 2e-3 * values.abs().amax(-1, keepdim=True))[good].all()
    assert back[0].eq(2.5).all() and back[1, 0].isnan().all() and back[1, 1:].isfinite().all()
    assert back[2].isfinite().all()


@pytest.mark.parametrize("largest, scale", [
    (224.0, 1.0), (224.1, 2.0), (448.0, 2.0), (112.0, 0.5), (112.01, 1.0), (1e-3, 2.0**-17), (0.0, 1.0),
    (float("inf"), 1.0), (float("nan"), 1.0), (7e4, 512.0),
])  # fmt: skip
def test_scales_are_powers_of_two_that_leave_twice_the_largest_in_range(largest, scale):
    assert scales_of(torch.tensor([largest])).item() == scale
    if scale != 1 and largest:
        assert 2 * largest / scale <= 448 < 4 * largest / scale


@pytest.mark.parametrize("kind, dim, page_size, share", [
    (KVFormat.AUTO, 128, 16, 1.0), (KVFormat.FP8, 128, 16, 0.5), (KVFormat.K8V4, 128, 16, 0.3828125),
    (KVFormat.K8V4, 64, 16, 0.390625), (KVFormat.K8V4, 2, 4, 0.875),
])  # fmt: skip
def test_pages_have_the_bytes_of_their_format(kind, dim, page_size, share):
    layout = KVLayout(kind, 2, dim, torch.bfloat16)
    whole = KVLayout(KVFormat.AUTO, 2, dim, torch.bfloat16).layer_bytes(page_size)
    assert layout.layer_bytes(page_size) == share * whole
    made = torch.zeros(layout.shape(3, 5, page_size), dtype=layout.stored)
    assert made.nbytes == 15 * layout.layer_bytes(page_size)
    assert KV(made, 0, torch.empty(0)).head_dim == dim


@pytest.mark.parametrize("heads, dim, page_size", [(2, 15, 16), (1, 2, 1), (1, 6, 2)])
def test_k8v4_is_refused_if_its_sections_are_not_whole_words(heads, dim, page_size):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: k8v4 needs .* take fp8 or auto"):
        KVLayout(KVFormat.K8V4, heads, dim, torch.bfloat16).layer_bytes(page_size)


CELLS = [
    (kind, heads, page_size) for heads, page_size in zip(HEADS, (16, 5, 16, 4, 8), strict=True) for kind in FORMATS
]


@runs(
    "kind, heads, page_size",
    [cell for cell in CELLS if cell[0] is KVFormat.FP8 or cell[2] != 5],
    keep=5,
)
def test_written_entries_are_those_of_the_reference_to_the_bit(implementation, kind, heads, page_size):
    """Scales of 0.25 and 0.5, one that is no power of two, and numbers beyond what is held. No other entry changes."""
    device, slots = implementation.device, torch.tensor([9, 1, 0, 0, 14, 22])
    for dtype in implementation.dtypes:
        layout = KVLayout(kind, heads.kv, heads.dim, dtype)
        raw = torch.randint(0, 255, (8, 2, layout.layer_bytes(page_size)), generator=torch.Generator().manual_seed(4))
        cache = raw.to(torch.uint8).to(device).view(layout.stored).view(layout.shape(8, 2, page_size))
        for scales in (SCALES, torch.tensor([[1.0, 1.0], [0.3, 0.7]])):
            qkv = random((6, heads.query + 2 * heads.kv, heads.dim), dtype, device, 9) * 40
            qkv[4] *= 100
            qkv[5, -1] = 2.5
            angles = random((6, heads.dim), F32, device, 6)
            table = torch.empty(0, dtype=torch.int32, device=device)
            own = KV(cache.clone(), LAYER, table, scales.to(device))
            implementation.kernels.rope_and_write(qkv, Rotation(None, 1e-6, angles), own, slots.to(device))
            wanted = KV(cache.cpu(), LAYER, table, scales)
            kv.write(wanted, slots, *qkv.cpu()[:, heads.query :].chunk(2, 1))
            got = own.cache.cpu()
            assert torch.equal(got[1:].view(torch.uint8), wanted.cache[1:].view(torch.uint8))
            assert torch.equal(got[:, 0].view(torch.uint8), wanted.cache[:, 0].view(torch.uint8))
            written = slots[4:] // page_size, LAYER, slice(None), slots[4:] % page_size
            assert decoded(got, heads.dim, scales)[written].isfinite().all()


@runs("kind, case", [(kind, case) for case in SHORT_CASES for kind in FORMATS], keep=16, cuda=[
    (kind, case) for case in GPU_CASES[::3] for kind in FORMATS
])  # fmt: skip
def test_attention_over_fewer_bits_equals_float64(implementation, kind, case):
    if kind is KVFormat.K8V4 and case.shape.page_size * case.shape.heads.kv * case.shape.heads.dim % 8:
        pytest.skip("k8v4 has no such pages")
    for dtype in implementation.dtypes:
        given, wanted = given_in(for_decode(case, dtype, implementation.device), kind)
        near(implementation.kernels.decode_attention(given.q, given.made.kv, given.batch, given.attend), wanted)
        given, wanted = given_in(for_prefill(case, dtype, implementation.device), kind)
        most = max(case.shape.sizes)
        got = implementation.kernels.prefill_attention(given.q, given.made.kv, given.batch, given.attend, most)
        near(got[: len(given.ranges)], wanted)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_chunks_of_plain_torch_over_fewer_bits_equal_float64(kind, case):
    given, wanted = given_in(for_prefill(case, F32, padding=0), kind)
    starts, done = given.batch.starts, []
    for row, size in enumerate(case.shape.sizes):
        low, high = starts[row], starts[row + 1]
        spans = None if given.batch.spans is None else given.batch.spans[low:high]
        one = RowBatch(given.batch.rows[row : row + 1], given.batch.kv_lens[row : row + 1], None, spans)
        start = case.shape.lengths[row] - size
        done.append(chunk_attention(given.q[low:high], given.made.kv, one, given.attend, start))
    near(torch.cat(done), wanted)
