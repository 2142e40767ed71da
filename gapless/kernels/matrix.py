"""Weights in one of several layouts, and the products by them.

A layout is an entry of a table: a name, the tensors that hold a weight, and a product that any device computes. Kernels
with faster products have them by the layout's name (`Kernels.products`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gapless.base.config import LAYOUT_PLUG_INS
from gapless.base.plug_ins import load
from gapless.kernels.linear import TorchLinear


class Linear(Protocol):
    """x [T, in] -> x @ weight.T + bias [T, out], with the weight in the layout its device likes best.

    The result is written to `out` (contiguous) if given, and returned. An implementation that can also return the
    weight's rows `ids` int64 [T] has a method `rows(ids) -> [T, in]`.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class Stored(NamedTuple):
    """A tensor of a weight [outputs, inputs]. Each output has a row, so projections of one input are joined by rows."""

    columns: Callable[[int], int]
    """Inputs -> columns of a row"""
    dtype: torch.dtype | None = None
    """None: the model's"""


class WeightLayout(NamedTuple):
    """How a weight is stored."""

    name: str
    tensors: Mapping[str, Stored]
    """Tensors by the last part of their names in a checkpoint"""
    product: Callable[..., Linear]
    """(*tensors, bias [outputs] or None) -> a product on any device. New weights of an update are copied to its
    attributes that are tensors."""


DENSE = WeightLayout("dense", {"weight": Stored(lambda inputs: inputs)}, TorchLinear)


class Matrix(NamedTuple):
    """The parameters of a product. Projections of one input are one matrix."""

    tensors: tuple[Tensor, ...]
    """Tensors in the order of the layout"""
    bias: Tensor | None = None
    """[outputs]; None where the family has none"""
    layout: WeightLayout = DENSE

    def named(self) -> dict[str, Tensor]:
        """Return its tensors by the last part of their names in a checkpoint."""
        bias = {} if self.bias is None else {"bias": self.bias}
        return dict(zip(self.layout.tensors, self.tensors, strict=True)) | bias


def layout_named(name: str) -> WeightLayout:
    """Return the layout of this name. Raises ConfigError for a plug-in that cannot be imported."""
    found: WeightLayout = DENSE if name == DENSE.name else load(LAYOUT_PLUG_INS, name, "quantization_config")
    return found


def dense(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """Return the matrix of a plain weight [outputs, inputs]."""
    return Matrix((weight,), bias)


def refill(product: Linear, matrix: Matrix) -> None:
    """Replace the weight of a product by one of the same layout and shape, from any device, in the memory known to
    graphs."""
    if isinstance(product, TorchLinear) and not product.packed:
        product.weight.copy_(matrix.tensors[0])
        if product.bias is not None and matrix.bias is not None:
            product.bias.copy_(matrix.bias)
    else:
        _copy(product, type(product)(*matrix.tensors, matrix.bias))  # type: ignore[call-arg]


def _copy(product: object, other: object) -> None:
    """Copy the tensors of `other` into the memory of `product`."""
    for name, found in vars(other).items():
        if isinstance(found, Tensor):
            getattr(product, name).copy_(found)
        elif hasattr(found, "weight"):
            _copy(getattr(product, name), found)
