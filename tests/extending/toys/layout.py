"""Weights of 8-bit whole numbers with a scale for each output, multiplied out in the product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from gapless.kernels.matrix import Stored, WeightLayout


class ByteRowsLinear:
    """A product x [T, in] -> x @ (weight * scale).T + bias [T, out]."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scale, self.bias = weight, scale, bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        found = linear(x, (self.weight * self.scale).to(x.dtype), self.bias)
        return found if out is None else out.copy_(found)


BYTE_ROWS = WeightLayout(
    "byte-rows",
    {
        "weight": Stored(columns=lambda inputs: inputs, dtype=torch.int8),
        "weight_scale": Stored(columns=lambda inputs: 1, dtype=torch.float32),
    },
    ByteRowsLinear,
)
