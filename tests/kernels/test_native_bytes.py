"""The product by weights in 8 and 4 bits: against float64 with the same rounded rows, and the same bits whatever stands
beside a row."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from kernels.native_kernels import check_threads, load_native, load_plain_variant
from torch import Tensor
from torch.nn.functional import pad

from gapless.kernels.kinds import WeightKind, WeightLayout
from gapless.kernels.matrix import Matrix, dense, refill, tensor_shapes
from gapless.kernels.native import ByteLinear, HalfFp8Linear, draft_linear

INT8, INT4 = WeightKind.INT8, WeightKind.INT4
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""Of the largest result: half a unit of rounding, twice; float32 sums of units add far less."""
ROWS = (1, 2, 3, 4, 7, 8, 17, 33)
"""Rows of few vectors, of AMX, past one and two of its tiles"""


class Case(NamedTuple):
    kind: WeightKind
    group: int
    outputs: int = 130
    inputs: int = 384
    dtype: torch.dtype = torch.float32
    half: bool = True
    """Whether float16 holds the scales"""
    zeros: bool = False
    """Whether each group of INT4 has its own zero"""
    biased: bool = True


CASES = [
    *(Case(INT8, group) for group in (0, 32, 64, 96, 128, 512)),
    *(Case(INT4, group, zeros=zeros) for group in (0, 32, 64, 96, 128) for zeros in (False, True)),
    Case(INT8, 32, half=False),
    Case(INT4, 64, zeros=True, half=False, biased=False),
    *(Case(kind, 32, 64, 64, dtype, biased=kind is INT8) for kind in (INT8, INT4) for dtype in ROUNDING),
    *(Case(INT8, group, 70, inputs) for group, inputs in ((0, 7), (0, 65), (32, 100), (64, 1), (128, 130))),
    Case(INT4, 0, 1, 32),
    Case(INT4, 128, 65, 160),
]


@pytest.fixture(autouse=True)
def here():
    load_native()
    torch.manual_seed(0)


def made(case: Case) -> Matrix:
    layout = WeightLayout(case.kind, case.group)
    shapes = tensor_shapes(layout, case.outputs, case.inputs, case.dtype)
    low, high = (-128, 128) if case.kind is INT8 else (0, 256)
    weight = torch.randint(low, high, shapes[0][0], dtype=shapes[0][1])
    scale = torch.rand(shapes[1][0]) * 0.01 + 0.001
    zero = [torch.randint(0, 17, size) if case.zeros else torch.full(size, 8) for size, _ in shapes[2:]]
    tensors = weight, scale.half().float() if case.half else scale, *(one.to(torch.uint8) for one in zero)
    bias = torch.randn(case.outputs).to(case.dtype) if case.biased else None
    return Matrix(tensors, bias, layout, case.dtype)


def in_steps(x: Tensor, group: int) -> Tensor:
    """Round each 32 or 64 inputs to 127 steps either way of what is largest there, float64 [T, K]."""
    unit = 32 if group % 64 else 64
    units = pad(x.float(), (0, -x.shape[1] % unit)).view(len(x), -1, unit)
    top = units.abs().amax(-1, keepdim=True)
    steps = torch.where(top > 1e-30, units * torch.full_like(top, 127.0).div(top), 0.0).round()
    return (steps.double() * (top / 127).double()).view(len(x), -1)[:, : x.shape[1]]


def numbers(matrix: Matrix) -> Tensor:
    """Return the weight in float64, by the words of `Matrix.tensors`."""
    weight, scale, *zero = matrix.tensors
    if zero:
        blocks = weight.view(len(weight), -1, 16).int()
        weight = torch.stack((blocks & 15, blocks >> 4), dim=2).view(len(weight), -1)
    size = matrix.layout.group or weight.shape[1]
    scale, *zero = (one.double().repeat_interleave(size, 1)[:, : weight.shape[1]] for one in (scale, *zero))
    return (weight.double() - (zero[0] if zero else 0.0)) * scale


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_is_that_of_the_rounded_rows_and_does_not_depend_on_the_batch(case):
    matrix = made(case)
    layer = ByteLinear.of(matrix)
    x = torch.randn(40, case.inputs)
    x[7] *= 1000.0  # far from its neighbors, and no other row is coarser for it
    x[1, 0], x[2] = 30.0, 0.0
    x = x.to(case.dtype)
    got = layer(x)
    want = in_steps(x, case.group) @ numbers(matrix).T + (0.0 if matrix.bias is None else matrix.bias.double())
    for row, line in enumerate(got.double() - want):
        assert line.abs().max() <= ROUNDING[case.dtype] * max(want[row].abs().max(), 1e-3)
    assert got.dtype == case.dtype
    for rows in ROWS:
        assert torch.equal(layer(x[-rows:]), got[-rows:]), rows
    out = torch.full_like(got, 7.0)
    assert layer(x, out) is out and torch.equal(out, got)


@pytest.mark.parametrize("kind", [INT8, INT4])
@pytest.mark.parametrize("group", [0, 32])
def test_sums_are_whole_when_every_number_is_the_largest(kind, group):
    """-128 by 127 over and over, where sums of 16 bits overflow; scales are powers of two, so float32 is exact."""
    matrix = made(Case(kind, group, 65, 256, biased=False))
    weight, scale, *zero = matrix.tensors
    scale.fill_(0.5)
    weight.fill_(-128 if kind is INT8 else 255)
    weight[1:2].fill_(127 if kind is INT8 else 0)
    for one in zero:
        one[::3] = 0
    layer = ByteLinear.of(matrix)
    for rows in (1, 3, 9):
        x = torch.full((rows, 256), -127.0)
        assert torch.equal(layer(x).double(), x.double() @ numbers(matrix).T)


@pytest.mark.parametrize("group", [0, 32])
def test_scales_of_zero_and_huge_ones_stay_with_their_group(group):
    matrix = made(Case(INT8, group, 64, 128, biased=False))
    matrix.tensors[1][5] = 0.0
    matrix.tensors[1][6] = 1e30
    x = torch.randn(5, 128)
    layer, got = ByteLinear.of(matrix), ByteLinear.of(matrix)(x)
    assert not got[:, 5].any() and torch.equal(layer(x[:1])[0], got[0])
    want = in_steps(x, group) @ numbers(matrix).T
    torch.testing.assert_close(got[:, 6].double(), want[:, 6], rtol=1e-4, atol=1e24)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(rows, value):
    layer, x = ByteLinear.of(made(Case(INT4, 32, 70, 128))), torch.randn(rows, 128)
    clean = layer(x)
    x[1, 5] = value
    got, others = layer(x), torch.arange(rows) != 1
    assert got[1].isnan().all() and torch.equal(got[others], clean[others])


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_rows_may_be_apart_and_threads_give_the_same_bits(kind):
    matrix = made(Case(kind, 32, 2048, 512))
    layer, x = ByteLinear.of(matrix), torch.randn(40, 512)
    wide = torch.zeros(40, 600)
    wide[:, 8:520] = x
    assert torch.equal(layer(wide[:, 8:520]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))
    for rows in (1, 40):
        check_threads(layer, x[:rows])


def test_a_new_weight_takes_the_place_of_one_whose_scales_are_stored_otherwise():
    """The form in which scales are kept is a weight's own: it goes along when the tensor is copied."""
    narrow, wide = (made(Case(INT4, 32, 64, 128, half=half, zeros=not half)) for half in (True, False))
    x = torch.randn(3, 128)
    for first, second in ((narrow, wide), (wide, narrow)):
        layer = ByteLinear.of(first)
        kept = layer.weight
        refill(layer, second)
        assert layer.weight is kept and torch.equal(layer(x), ByteLinear.of(second)(x))


def test_groups_that_are_no_multiples_of_32_and_other_kinds_are_left_to_be_multiplied_out():
    matrix = made(Case(INT8, 48, 64, 96))
    assert ByteLinear.of(matrix) is None
    kernels = load_native()
    product = kernels.linear(matrix)
    assert product.kind is WeightKind.DENSE and not isinstance(product, ByteLinear)
    assert isinstance(kernels.linear(made(Case(INT8, 32, 64, 96))), ByteLinear)


def test_operands_that_do_not_fit_are_refused():
    layer, x = ByteLinear.of(made(Case(INT8, 32, 64, 96))), torch.randn(2, 96)
    for wrong in (torch.randn(2, 160), torch.randn(2, 64)):
        with pytest.raises(RuntimeError, match="other shapes"):
            layer(wrong)
    for out in (torch.empty(2, 65), torch.empty(2, 64).half(), torch.empty(2, 128)[:, ::2]):
        with pytest.raises(RuntimeError, match="another shape or dtype"):
            layer(x, out)


def test_a_drafting_head_keeps_bytes_of_every_kind_of_weight():
    x = torch.randn(5, 128)
    weight = torch.randn(70, 128)
    layer = draft_linear(dense(weight))
    assert isinstance(layer, ByteLinear) and layer.kind is WeightKind.DENSE
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=0.05, atol=1.0)
    refill(layer, dense(-weight))
    torch.testing.assert_close(layer(x), -x @ weight.T, rtol=0.05, atol=1.0)
    quantised = made(Case(INT4, 32, 70, 128))
    assert torch.equal(draft_linear(quantised)(x), ByteLinear.of(quantised)(x))


def eight_bits(group: int, outputs: int, inputs: int, biased: bool = True) -> Matrix:
    """Return a weight with every number of FP8, the least ones too."""
    if missing := torch.ops.gapless.amx_missing():
        pytest.skip(missing)
    codes = torch.arange(outputs * inputs).mul(37).remainder(251).to(torch.uint8).view(outputs, inputs)
    weight = torch.where(codes & 127 == 127, 3, codes).view(torch.float8_e4m3fn)
    layout = WeightLayout(WeightKind.FP8, group)
    bias = torch.randn(outputs).bfloat16() if biased else None
    return Matrix((weight, torch.rand(outputs, layout.groups(inputs)) + 0.5), bias, layout, torch.bfloat16)


@pytest.mark.parametrize(
    ("group", "outputs", "inputs"),
    [
        (0, 64, 32),
        (0, 130, 384),
        (0, 70, 7),
        (0, 1, 400),
        (32, 65, 100),
        (128, 130, 416),
        (128, 64, 130),
        (512, 80, 384),
    ],
)
def test_fp8_is_exact_and_does_not_depend_on_the_batch(group, outputs, inputs):
    matrix = eight_bits(group, outputs, inputs)
    layer, x = HalfFp8Linear.of(matrix), torch.randn(150, inputs).bfloat16()
    got, weight = layer(x), numbers(matrix)
    want = x.double() @ weight.T + matrix.bias.double()
    room = (x.double().abs() @ weight.abs().T) * 2**-21 + want.abs() * 2**-8
    assert ((got.double() - want).abs() <= room).all()
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 129):
        assert torch.equal(layer(x[-rows:]), got[-rows:]), rows
    out = torch.full_like(got, 7.0)
    assert layer(x, out) is out and torch.equal(out, got)
    assert torch.equal(layer(x.T.contiguous().T), got)
    check_threads(layer, x)


def test_fp8_keeps_a_value_that_is_no_number_in_its_row_and_its_output():
    matrix = eight_bits(32, 64, 96, biased=False)
    x = torch.randn(5, 96).bfloat16()
    clean = HalfFp8Linear.of(matrix)(x)
    matrix.tensors[0].view(torch.uint8)[3, 40] = 255
    x[1, 5] = torch.nan
    got, rows, columns = HalfFp8Linear.of(matrix)(x), torch.arange(5) != 1, torch.arange(64) != 3
    assert got[1].isnan().all() and got[:, 3].isnan().all()
    assert torch.equal(got[rows][:, columns], clean[rows][:, columns])


def test_fp8_is_multiplied_out_when_the_model_is_not_bfloat16_or_the_group_does_not_fit():
    matrix = eight_bits(128, 64, 128)
    for other in (matrix._replace(dtype=torch.float32), eight_bits(48, 64, 96)):
        assert HalfFp8Linear.of(other) is None
        assert load_native().linear(other).kind is WeightKind.DENSE


@pytest.mark.process
def test_narrower_vectors_have_the_same_sums(tmp_path):
    """Whole numbers are summed up, so each unit gives the same ones; the scales' products may differ in a last bit."""
    ops = load_plain_variant(tmp_path)
    for case in CASES:
        matrix = made(case)
        x, zero = torch.randn(5, case.inputs).to(case.dtype), (*matrix.tensors, None)[2]
        packed = ops.linear_pack_bytes.default(*matrix.tensors[:2], zero, case.group)
        layer, bits = ByteLinear.of(matrix), ROUNDING[case.dtype]
        whole = ops.linear_bytes.default(x, packed, case.outputs, case.group, matrix.bias)
        torch.testing.assert_close(whole, layer(x), rtol=bits, atol=2e-4)
        for rows in (1, 2, 3):
            some = ops.linear_bytes.default(x[:rows], packed, case.outputs, case.group, matrix.bias)
            assert torch.equal(some, whole[:rows]), case
