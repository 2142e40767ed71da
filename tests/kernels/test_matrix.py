"""Weights in our layouts: rounding, values, cuts, and products that are not there."""

from __future__ import annotations

import itertools

import pytest
import torch

from gapless.kernels import plain
from gapless.kernels.kinds import DENSE, WeightKind, WeightLayout
from gapless.kernels.matrix import Matrix, dense, packed, refill, round_to, tensor_shapes

LAYOUTS = [
    WeightLayout(kind, group)
    for kind, group in itertools.product((WeightKind.FP8, WeightKind.INT8, WeightKind.INT4), (0, 32, 64, 128))
]
STEPS = {WeightKind.FP8: 2.0**-4, WeightKind.INT8: 0.501 / 127, WeightKind.INT4: 1.001 / 15}
"""Largest error by rounding, as a share of a group's largest number; of INT4 of its span, whose ends move with the
zero"""


def matrix_of(layout, outputs=24, inputs=256, bias=None):
    torch.manual_seed(1)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    return weight, Matrix(round_to(layout, weight), bias, layout, torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rounded_weight_is_near_in_each_group(layout):
    weight, matrix = matrix_of(layout)
    shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in matrix.tensors]
    assert shapes == tensor_shapes(layout, 24, 256, torch.bfloat16) and (matrix.outputs, matrix.inputs) == (24, 256)
    groups = weight.double().view(24, -1, layout.group or 256)
    span = groups.amax(2) - groups.amin(2) if layout.kind is WeightKind.INT4 else groups.abs().amax(2)
    error = (matrix.values().double().view(groups.shape) - groups).abs().amax(2)
    assert (error <= STEPS[layout.kind] * span).all()
    assert matrix.multiplied_out().tensors[0].equal(matrix.values().bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rounding_again_changes_nothing(layout):
    _, matrix = matrix_of(layout)
    if layout.kind is WeightKind.INT4:  # its ends may have moved with the zero
        scale, zero = matrix.tensors[1:]
        numbers = torch.randint(0, 16, (24, 256))
        again = Matrix((packed(numbers), scale, zero), None, layout, torch.float32)
        wide = [x.repeat_interleave(256 // x.shape[1], 1) for x in (scale.double(), zero.double())]
        assert again.values().double().sub((numbers - wide[1]) * wide[0]).abs().max() < 1e-6
        return
    again = Matrix(round_to(layout, matrix.values()), None, layout, torch.bfloat16)
    torch.testing.assert_close(again.values(), matrix.values(), rtol=1e-6, atol=0)


def test_a_group_of_zeros_stays_zero():
    for layout in LAYOUTS:
        assert not Matrix(round_to(layout, torch.zeros(4, 128)), None, layout).values().any()


@pytest.mark.parametrize("layout", [DENSE, *LAYOUTS], ids=str)
def test_a_cut_by_rows_or_columns_has_the_same_numbers(layout):
    _, matrix = matrix_of(layout, bias=torch.arange(24.0))
    matrix = matrix._replace(dtype=torch.float32)
    rows = matrix.rows(5, 17)
    assert rows.values().equal(matrix.values()[5:17]) and rows.bias.equal(matrix.bias[5:17])
    for first, last in ((0, 128), (128, 256)):
        assert matrix.columns(first, last).values().equal(matrix.values()[:, first:last])


def test_a_cut_inside_a_group_is_not_made():
    with pytest.raises(AssertionError, match="between groups"):
        matrix_of(WeightLayout(WeightKind.INT4, 64))[1].columns(0, 32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_weight_without_a_product_is_multiplied_out(layout):
    kernels = plain.KERNELS._replace(products={WeightKind.DENSE: plain.KERNELS.products[WeightKind.DENSE]})
    _, matrix = matrix_of(layout, bias=torch.randn(24, dtype=torch.bfloat16))
    product, x = kernels.linear(matrix), torch.randn(3, 256, dtype=torch.bfloat16)
    wanted = x.double() @ matrix.multiplied_out().tensors[0].double().T + matrix.bias.double()
    torch.testing.assert_close(product(x).double(), wanted, rtol=2**-7, atol=2**-6)
    assert product.kind is WeightKind.DENSE


@pytest.mark.parametrize("layout", [DENSE, *LAYOUTS], ids=str)
def test_new_weights_take_the_memory_of_the_old(layout):
    torch.manual_seed(2)
    old, new = (torch.randn(16, 128, dtype=torch.float32) for _ in range(2))
    product = plain.KERNELS.linear(Matrix(round_to(layout, old), None, layout))
    x, matrix = torch.randn(2, 128), Matrix(round_to(layout, new), None, layout)
    places = [tensor.data_ptr() for tensor in vars(product).values() if isinstance(tensor, torch.Tensor) and not
              tensor.is_mkldnn]  # fmt: skip
    refill(product, matrix)
    assert product(x).equal(plain.KERNELS.linear(matrix)(x))
    assert places == [tensor.data_ptr() for tensor in vars(product).values() if isinstance(tensor, torch.Tensor) and not
                      tensor.is_mkldnn]  # fmt: skip


def test_a_dense_matrix_has_the_dtype_of_its_weight():
    assert dense(torch.empty(2, 2, dtype=torch.float16)).dtype is torch.float16


def test_a_group_larger_than_the_inputs_is_the_whole_row():
    whole = round_to(WeightLayout(WeightKind.INT8), torch.randn(3, 40))
    values = [Matrix(whole, None, WeightLayout(WeightKind.INT8, group)).values() for group in (0, 1 << 40)]
    assert values[0].equal(values[1])
