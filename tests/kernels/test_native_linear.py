"""The packed linear layer: against float64, and the same bits whatever stands beside a row; and tensors joined."""

from __future__ import annotations

import pytest
import torch
from kernels.native_kernels import check_threads, load_native, load_plain_variant

from gapless.kernels.native import NativeLinear, Way

SIZES = [(1, 2), (16, 7), (17, 64), (63, 100), (64, 256), (65, 1000), (130, 1026), (192, 50), (452, 31), (512, 3072)]
"""(outputs, inputs): around the tile of 64, three tiles, the vector of 16, the pair and the blocks of 64, 128 and 1,024
inputs"""
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Half a unit of rounding, twice; float32 sums add far less."""


PAIRS = [(Way.BF16_DOT, torch.bfloat16), (Way.AMX, torch.bfloat16)]


def needs(way: Way) -> None:
    if way is not Way.FLOATS and not torch.ops.gapless.has_bf16_dot():
        pytest.skip("this processor does not multiply bfloat16")
    if way is Way.AMX and (missing := torch.ops.gapless.amx_missing()):
        pytest.skip(missing)


@pytest.fixture(autouse=True)
def here():
    load_native()
    torch.manual_seed(0)


def made(outputs: int, inputs: int, rows: int, dtype: torch.dtype = torch.bfloat16):
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return weight, torch.randn(outputs).to(dtype), torch.randn(rows, inputs).to(dtype)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("way", "dtype"), [*((Way.FLOATS, dtype) for dtype in ERRORS), *PAIRS])
def test_agrees_with_float64_and_does_not_depend_on_the_batch(outputs, inputs, biased, way, dtype):
    needs(way)
    weight, bias, x = made(outputs, inputs, 200, dtype)
    layer = NativeLinear(weight, bias if biased else None)
    layer.way = way
    got = layer(x)
    want = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    torch.testing.assert_close(got.double(), want, rtol=ERRORS[dtype], atol=1e-4)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13, 23, 24, 97, 193):
        assert torch.equal(layer(x[-rows:]), got[-rows:]), rows


@pytest.mark.parametrize("way", [Way.FLOATS, Way.BF16_DOT, Way.AMX])
def test_ways_differ_by_the_order_of_float32_sums_alone(way):
    """By 2**-22 of what is summed up at most, which is what 256 inputs in float32 may lose."""
    needs(way)
    weight, _, x = made(192, 256, 40)
    layer, want = NativeLinear(weight), x.double() @ weight.double().T
    layer.way = way
    room = (x.double().abs() @ weight.double().abs().T) * 2**-22 + want.abs() * 2**-8
    assert ((layer(x).double() - want).abs() <= room).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_other_dtypes_are_multiplied_by_a_weight_in_bfloat16(dtype):
    weight, _, _ = made(96, 70, 1)
    x, bias = torch.randn(9, 70).to(dtype), torch.randn(96).to(dtype)
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(NativeLinear(weight, bias)(x).double(), want, rtol=ERRORS[dtype], atol=1e-4)


def test_rows_in_bfloat16_are_not_multiplied_by_other_dtypes():
    layer = NativeLinear(torch.randn(32, 16))
    with pytest.raises(RuntimeError, match="bfloat16 is multiplied by bfloat16"):
        layer(torch.randn(2, 16).bfloat16())


def test_rows_of_a_wider_tensor_give_the_same_bits():
    weight, _, x = made(64, 32, 9)
    wide = torch.zeros(9, 80, dtype=torch.bfloat16)
    wide[:, 16:48] = x
    layer = NativeLinear(weight)
    assert torch.equal(layer(wide[:, 16:48]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize("rows", (1, 5, 40))
def test_a_product_in_place_has_the_bits_of_a_new_one(rows):
    weight, bias, x = made(192, 65, rows)
    product, out = NativeLinear(weight, bias), torch.full((rows, 192), 7.0).bfloat16()
    assert product(x, out) is out
    assert torch.equal(out, product(x))
    for wrong in (out[:, :100].contiguous(), torch.empty(rows, 384).bfloat16()[:, ::2], out.float()):
        with pytest.raises(RuntimeError, match="another shape or dtype"):
            product(x, wrong)


@pytest.mark.parametrize(("first", "second", "width"), [(0, 3, 8), (1, 1, 5), (7, 300, 2048), (2048, 9, 1024)])
def test_join_puts_the_second_after_the_first(first, second, width):
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(first, width).to(dtype), torch.randn(second, width).to(dtype)
        assert torch.equal(torch.ops.gapless.join(a, b), torch.cat((a, b)))


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rows_of_the_weight_come_back(outputs, inputs, dtype):
    weight, _, _ = made(outputs, inputs, 1, dtype)
    ids = torch.randint(0, outputs, (9,))
    assert torch.equal(NativeLinear(weight).rows(ids), weight[ids])


def test_a_row_that_is_not_there_is_refused():
    weight, _, _ = made(40, 32, 1)
    layer = NativeLinear(weight)
    for row in (-1, 40):
        with pytest.raises(IndexError, match=f"no row {row}"):
            layer.rows(torch.tensor([3, row]))


@pytest.mark.parametrize("dtype", ERRORS)
def test_a_nan_stays_in_its_row(dtype):
    weight, _, x = made(64, 128, 8, dtype)
    layer = NativeLinear(weight)
    clean = layer(x)
    x[3, 5] = torch.nan
    got = layer(x)
    assert got[3].isnan().all()
    assert torch.equal(got[torch.arange(8) != 3], clean[torch.arange(8) != 3])


def test_a_packed_weight_has_no_second_copy():
    """Packing adds nothing but the padding to whole vectors and pairs."""
    assert NativeLinear(torch.zeros(130, 33, dtype=torch.bfloat16)).weight.numel() == 144 * 34
    assert NativeLinear(torch.zeros(130, 33)).weight.numel() == 144 * 33


@pytest.mark.parametrize("dtype", ERRORS)
def test_threads_give_the_same_bits(dtype):
    weight, bias, x = made(2048, 512, 40, dtype)
    check_threads(NativeLinear(weight, bias), x)


@pytest.mark.process
@pytest.mark.parametrize("dtype", ERRORS)
def test_the_product_of_narrower_vectors_agrees_and_does_not_depend_on_the_batch(tmp_path, dtype):
    ops = load_plain_variant(tmp_path)
    for outputs, inputs in SIZES:
        weight, bias, x = made(outputs, inputs, 40, dtype)
        packed = ops.linear_pack.default(weight)
        got = ops.linear.default(x, packed, outputs, bias, Way.FLOATS)
        want = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(got.double(), want, rtol=ERRORS[dtype], atol=1e-4)
        for rows in range(1, 9):
            assert torch.equal(ops.linear.default(x[-rows:], packed, outputs, bias, Way.FLOATS), got[-rows:]), rows
        ids = torch.randint(0, outputs, (5,))
        assert torch.equal(ops.embedding_packed.default(ids, packed, outputs, inputs), weight[ids])
