"""The packed layout gives what the plain one gives, and is left alone where torch cannot do it."""

from __future__ import annotations

import pytest
import torch

from gapless.kernels import linear
from gapless.kernels.linear import TorchLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_packed_weight_gives_the_plain_product(dtype, biased):
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype) if biased else None
    x = torch.randn(5, 16).to(dtype)
    got = TorchLinear(weight, bias)(x)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias))


def test_a_torch_without_the_operators_uses_the_plain_layout(monkeypatch):
    weight = torch.randn(8, 4)
    monkeypatch.setattr(linear, "NEEDED", ("no_such_operator",))
    layer = TorchLinear(weight)
    assert not layer.packed and layer.weight is weight
    assert torch.equal(layer(torch.eye(4)), weight.T)
