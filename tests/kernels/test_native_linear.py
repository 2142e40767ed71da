"""The packed bfloat16 linear layer: against float64, and the same bits whatever stands beside a row."""

from __future__ import annotations

import pytest
import torch
from kernels.native_kernels import check_threads, load_native
from torch import Tensor

from gapless.kernels import native
from gapless.kernels.native import NativeLinear

SIZES = [(1, 2), (16, 7), (17, 64), (63, 100), (64, 256), (65, 1000), (130, 1026), (192, 50), (452, 31), (512, 3072)]
"""(outputs, inputs): around the tile of 64, three tiles, the vector of 16, the pair and the blocks of 128 and 1,024
inputs"""


@pytest.fixture(autouse=True)
def here():
    load_native()
    if not torch.ops.gapless.has_bf16_dot():
        pytest.skip("this processor does not multiply bfloat16")
    torch.manual_seed(0)


def made(outputs: int, inputs: int, rows: int):
    weight = (torch.randn(outputs, inputs) / inputs**0.5).bfloat16()
    return weight, torch.randn(outputs).bfloat16(), torch.randn(rows, inputs).bfloat16()


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("amx", [False, True])
def test_agrees_with_float64_and_does_not_depend_on_the_batch(outputs, inputs, biased, amx):
    if amx and (missing := torch.ops.gapless.amx_missing()):
        pytest.skip(missing)
    weight, bias, x = made(outputs, inputs, 200)
    layer = NativeLinear(weight, bias if biased else None)
    layer.amx = amx
    got = layer(x)
    want = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
    # bfloat16 has 8 bits: half a unit of rounding is 2**-9 of the value; float32 sums add far less.
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)
    for rows in (1, 2, 5, 6, 7, 12, 13, 23, 24, 97):
        assert torch.equal(layer(x[:rows]), got[:rows]), rows


def test_rows_of_a_wider_tensor_give_the_same_bits():
    weight, _, x = made(64, 32, 9)
    wide = torch.zeros(9, 80, dtype=torch.bfloat16)
    wide[:, 16:48] = x
    layer = NativeLinear(weight)
    assert torch.equal(layer(wide[:, 16:48]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rows_of_the_weight_come_back(outputs, inputs):
    weight, _, _ = made(outputs, inputs, 1)
    ids = torch.randint(0, outputs, (9,))
    assert torch.equal(NativeLinear(weight).rows(ids), weight[ids])


def test_a_row_that_is_not_there_is_refused():
    weight, _, _ = made(40, 32, 1)
    layer = NativeLinear(weight)
    for row in (-1, 40):
        with pytest.raises(IndexError, match=f"no row {row}"):
            layer.rows(torch.tensor([3, row]))


def test_a_nan_stays_in_its_row():
    weight, _, x = made(64, 128, 8)
    layer = NativeLinear(weight)
    clean = layer(x)
    x[3, 5] = torch.nan
    got = layer(x)
    assert got[3].isnan().all()
    assert torch.equal(got[torch.arange(8) != 3], clean[torch.arange(8) != 3])


def test_a_packed_weight_has_no_second_copy():
    """Packing adds nothing but the padding to whole vectors and pairs."""
    assert NativeLinear(torch.zeros(130, 33, dtype=torch.bfloat16)).weight.numel() == 144 * 34


def test_threads_give_the_same_bits():
    weight, bias, x = made(2048, 512, 40)
    check_threads(NativeLinear(weight, bias), x)


def test_other_dtypes_go_to_torch():
    weight = torch.randn(8, 4)
    assert not isinstance(native.linear(weight, None), NativeLinear)
    assert isinstance(native.linear(weight.bfloat16(), None), NativeLinear)


@pytest.mark.parametrize("biased", [False, True])
def test_a_small_float32_layer_gives_the_product_for_few_rows_and_for_many(biased):
    load_native()
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 70, generator=generator)
    bias = torch.randn(96, generator=generator) if biased else None
    layer = native.linear(weight, bias)
    assert isinstance(layer, native.SmallLinear)
    for rows in (1, native.FEW, native.FEW + 1, 40):
        x, out = torch.randn(rows, 70, generator=generator), torch.empty(rows, 96)
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
        assert layer(x, out) is out and torch.equal(out, layer(x))
    assert not isinstance(native.linear(torch.randn(1025, 1024), None), native.SmallLinear)


def in_steps(x: Tensor) -> Tensor:
    """Round the last dimension to 127 steps either way of what is largest there."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (x * (1 / step)).round() * step, x).double()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 13])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 7), (192, 64), (230, 71), (452, 200)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_drafter_s_layer_gives_the_product_of_what_was_rounded(rows, outputs, inputs, biased):
    if not torch.ops.gapless.has_byte_dot():
        pytest.skip("this processor does not multiply bytes")
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    x[0, 3] = 300.0  # its neighbors are coarse, others are not
    bias = torch.randn(outputs) if biased else None
    layer = native.draft_linear(weight, bias)
    assert isinstance(layer, native.ByteLinear)
    rounded = torch.cat([in_steps(some) for some in x.split(64, dim=1)], dim=1)
    want = rounded @ in_steps(weight).T + (0.0 if bias is None else bias)
    torch.testing.assert_close(layer(x), want.float(), rtol=1e-4, atol=1e-3)
    wide = torch.zeros(rows, inputs + 9)
    wide[:, 4:-5] = x
    assert torch.equal(layer(wide[:, 4:-5]), layer(x)), "rows may lie apart"
    assert all(torch.equal(layer(x[row : row + 1])[0], line) for row, line in enumerate(layer(x)))
    assert torch.equal(layer(x, torch.empty(rows, outputs)), layer(x))
    half = layer(x.bfloat16()) if bias is None else None
    assert half is None or (half.dtype == torch.bfloat16 and torch.equal(half, layer(x.bfloat16().float()).bfloat16()))


def test_what_is_no_number_stays_in_its_row_of_a_drafter_s_layer():
    if not torch.ops.gapless.has_byte_dot():
        pytest.skip("this processor does not multiply bytes")
    layer, x = native.draft_linear(torch.randn(70, 130), None), torch.randn(4, 130)
    clean = layer(x)
    x[1, 5], x[2] = torch.nan, 1e-38
    got = layer(x)
    assert got[1].isnan().all() and not got[2].any() and torch.equal(got[[0, 3]], clean[[0, 3]])


def test_a_drafter_s_layer_is_a_hundredth_off():
    weight, x = torch.randn(300, 512), torch.randn(40, 512)
    want = x @ weight.T
    assert (native.draft_linear(weight, None)(x) - want).norm() < 0.012 * want.norm()
