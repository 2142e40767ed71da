"""The C++ kernels of `--batch-invariant`: a row's bits follow from the row."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.native_kernels import load_native, load_plain_variant
from kernels.paged import Heads, paged, queries

from gapless.base.errors import ConfigError
from gapless.kernels.choose import choose
from gapless.kernels.matrix import dense
from gapless.kernels.native import NATIVE_DTYPES, NativeLinear
from gapless.kernels.views import Attend, Reach, RowBatch


@pytest.fixture(autouse=True)
def here():
    load_native()
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_the_record_has_a_product_of_ours_for_every_dtype(dtype):
    linear = choose("native", dtype, batch_invariant=True).linear
    assert isinstance(linear(dense(torch.randn(4, 8).to(dtype))), NativeLinear)


def test_a_device_with_torchs_kernels_alone_is_refused_by_the_capability():
    with pytest.raises(ConfigError, match=r"batch_invariant .*capability kernels"):
        choose("torch", batch_invariant=True)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(
    "heads", [Heads(2, 1, 64), Heads(1, 1, 128), Heads(7, 1, 80), Heads(8, 2, 32), Heads(6, 2, 16)]
)
def test_a_query_has_the_same_bits_in_any_chunk_and_alone(heads, dtype):
    """Before and after the 512 keys at which a decode row's sums are cut."""
    check_any_chunk(choose("native", dtype, batch_invariant=True), heads, dtype)


@pytest.mark.process
def test_a_query_has_the_same_bits_without_the_bfloat16_dot_product(tmp_path):
    ops = load_plain_variant(tmp_path)
    from gapless.kernels import unpack

    kernels = load_native()._replace(
        decode_attention=unpack.decode_attention(ops.decode_attention.default),
        prefill_attention=unpack.prefill_attention(ops.invariant_prefill_attention.default),
    )
    for dtype in NATIVE_DTYPES:
        check_any_chunk(kernels, Heads(2, 1, 64), dtype)


def check_any_chunk(kernels, heads, dtype):
    length, dim = 1030, heads.dim
    case, q = paged(heads, [40, length], dtype=dtype), queries(heads, length, dtype=dtype)
    row = case.rows[1:]
    sinks = torch.linspace(-2, 7, heads.query)
    for kind in (Attend(1.0), Attend(1.0, Reach.WINDOW, 530, 3.0, sinks), Attend(1.0, Reach.CHUNK, 100, 0.0, sinks)):
        attend = kind._replace(scale=dim**-0.5)

        def prefill(low, high, attend=attend):
            batch = RowBatch(row, torch.tensor([high]), torch.tensor([0, high - low]))
            return kernels.prefill_attention(q[low:high], case.kv, batch, attend, high - low)

        whole = prefill(0, length)
        for cuts in ([500, 512, 515], [1, 530, 1023, 1025], [1029]):
            borders = [0, *cuts, length]
            parts = [prefill(low, high) for low, high in itertools.pairwise(borders)]
            assert torch.equal(torch.cat(parts), whole), (kind, cuts)
        some = [0, 5, 63, 64, 65, 511, 512, 513, 528, 529, 530, 531, 700, 1023, 1024, 1029]
        batch = RowBatch(row.repeat(len(some)), torch.tensor(some) + 1)
        assert torch.equal(kernels.decode_attention(q[some], case.kv, batch, attend), whole[some]), kind
