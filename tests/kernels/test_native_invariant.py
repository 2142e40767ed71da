"""The C++ kernels of `--batch-invariant`: a row's bits follow from the row, in float32 and bfloat16."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.native_kernels import check_threads, load_native, load_plain_variant
from kernels.test_native_attention import LENGTHS, PAGE, made, queries

from gapless.kernels import native
from gapless.kernels.choose import choose
from gapless.kernels.native import NativeLinear, WideLinear
from gapless.kernels.views import RowBatch

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(1, 2), (16, 7), (17, 64), (63, 100), (65, 1000), (130, 1026), (512, 768)]
"""(outputs, inputs): around the tile of 64 and the vector of 16"""


@pytest.fixture(autouse=True)
def here():
    load_native()
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_product_agrees_with_float64_and_does_not_depend_on_the_batch(outputs, inputs, dtype):
    weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(200, inputs).to(dtype)
    layer = WideLinear(weight, bias)
    got = layer(x)
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for rows in (1, 2, 5, 6, 7, 12, 13, 97):
        assert torch.equal(layer(x[-rows:]), got[-rows:]), rows


def test_rows_of_a_wider_tensor_give_the_same_bits():
    weight, wide = torch.randn(64, 32), torch.randn(9, 80)
    layer = WideLinear(weight)
    assert torch.equal(layer(wide[:, 16:48]), layer(wide[:, 16:48].contiguous()))


def test_threads_give_the_same_bits():
    check_threads(WideLinear(torch.randn(1024, 512), torch.randn(1024)), torch.randn(40, 512))


def test_the_record_has_a_product_of_ours_for_every_dtype():
    linear = choose("cpu", torch.float32, batch_invariant=True).linear
    assert isinstance(linear(torch.randn(4, 8), None), WideLinear)
    kind = NativeLinear if torch.ops.gapless.has_bf16_dot() else WideLinear
    assert isinstance(linear(torch.randn(4, 8).bfloat16(), None), kind)
    assert choose("cpu", torch.float32).linear is native.linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "grouped", "dim"), [(1, 2, 64), (1, 1, 128), (1, 7, 80), (2, 4, 32), (2, 3, 16)])
def test_a_query_has_the_same_bits_in_any_chunk_and_alone(kv_heads, grouped, dim, dtype):
    """Before and after the 512 keys at which a decode row's sums are cut."""
    check_any_chunk(choose("cpu", dtype, batch_invariant=True), kv_heads, grouped, dim, dtype)


def test_it_holds_without_the_bfloat16_dot_product(tmp_path):
    ops = load_plain_variant(tmp_path)
    from gapless.kernels import unpack

    kernels = load_native()._replace(
        decode_attention=unpack.decode_attention(ops.decode_attention.default),
        prefill_attention=unpack.prefill_attention(ops.prefill_attention.default),
    )
    for dtype in DTYPES:
        check_any_chunk(kernels, 1, 2, 64, dtype)


def check_any_chunk(kernels, kv_heads, grouped, dim, dtype):
    case = made(kv_heads, dim, dtype)
    index, length = len(LENGTHS) - 1, LENGTHS[-1]
    assert length > 1024 and PAGE < 512
    q, row = queries(length, kv_heads, grouped, dim, dtype), case.rows[index : index + 1]

    def prefill(low, high):
        batch = RowBatch(row, torch.tensor([high]), torch.tensor([0, high - low]))
        return kernels.prefill_attention(q[low:high], case.kv, batch, dim**-0.5, high - low)

    whole = prefill(0, length)
    for cuts in ([500, 512, 515], [1, 530, 1023, 1025], [1029]):
        borders = [0, *cuts, length]
        parts = [prefill(low, high) for low, high in itertools.pairwise(borders)]
        assert torch.equal(torch.cat(parts), whole), cuts
    some = [0, 5, 63, 64, 65, 511, 512, 513, 700, 1023, 1024, 1029]
    batch = RowBatch(row.repeat(len(some)), torch.tensor(some) + 1)
    assert torch.equal(kernels.decode_attention(q[some], case.kv, batch, dim**-0.5), whole[some])
