"""Operands of layers, and their products in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.linear import TorchLinear

EPS = 1e-5
ROUNDING = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 3e-2}
"""Of values about one: those of 16 bits are also rounded between the norm's weight and the product."""


class Shape(NamedTuple):
    rows: int
    columns: int
    depth: int


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(device)


def operands(device: str, dtype: torch.dtype, shape: Shape, biased: bool) -> tuple[Tensor, TorchLinear, Tensor]:
    """Input, layer, and norm; a result is about one in size."""
    rows, columns, depth = shape
    x = random((rows, depth), dtype, device, 1, 2.0)
    weight = random((columns, depth), dtype, device, 2, depth**-0.5)
    bias = random((columns,), dtype, device, 3) if biased else None
    layer = TorchLinear(weight.double(), bias)  # in float64 no device packs it
    layer.weight = weight
    return x, layer, random((depth,), torch.float32, device, 4, 0.3) + 1


def normed(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """In float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def expected(x: Tensor, layer: TorchLinear, norm: Tensor | None) -> Tensor:
    """In float64."""
    product = (x.double() if norm is None else normed(x, norm)) @ layer.weight.double().T
    return product if layer.bias is None else product + layer.bias.double()


def gated(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
