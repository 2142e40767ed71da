"""The packed layout gives what the plain one gives, and is left alone where torch cannot do it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.kernels import linear
from gapless.kernels.linear import TorchLinear, filled_up
from gapless.step.graphs import BUCKETS


def test_a_torch_without_the_operators_uses_the_plain_layout(monkeypatch):
    weight = torch.randn(8, 4)
    monkeypatch.setattr(linear, "NEEDED", ("no_such_operator",))
    layer = TorchLinear(weight)
    assert not layer.packed and layer.weight is weight
    assert torch.equal(layer(torch.eye(4)), weight.T)


def test_rows_are_filled_up_to_few_numbers_of_them_and_decode_steps_to_none():
    sizes = {filled_up(rows) for rows in range(1, 1025)}
    assert len(sizes) == 36 and set(BUCKETS) <= sizes
    assert all(rows <= filled_up(rows) <= rows * 5 / 4 for rows in range(1, 1025))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 9, 17, 65, 129])
def test_rows_that_are_filled_up_give_the_plain_product(rows, biased, dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(24, 16, dtype=dtype), torch.randn(rows, 16, dtype=dtype)
    bias = torch.randn(24, dtype=dtype) if biased else None
    expected = torch.nn.functional.linear(x, weight, bias)
    layer, out = TorchLinear(weight, bias), torch.empty(rows, 24, dtype=dtype)
    for got in (layer(x), layer(x, out), out):
        torch.testing.assert_close(got, expected)


class Seen(TorchDispatchMode):
    """Collects the numbers of rows that oneDNN is given."""

    def __init__(self):
        super().__init__()
        self.rows = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_linear_pointwise" in str(func):
            self.rows.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def test_rows_are_filled_up_before_onednn_sees_them():
    layer = TorchLinear(torch.randn(8, 4))
    if not layer.packed:
        pytest.skip("torch has no blocked layout of oneDNN here")
    with torch.inference_mode(), Seen() as seen:
        shapes = [layer(torch.zeros(rows, 4)).shape for rows in range(1, 65)]
    assert shapes == [(rows, 8) for rows in range(1, 65)]
    assert seen.rows == {filled_up(rows) for rows in range(1, 65)}
