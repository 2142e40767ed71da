"""Decoder layers of rows with adapters on CUDA: `LayerOps` with the tables below the matrices.

A product computes the first half of every slot's adapter for every row, even of a slot being loaded: a slot's result is
read for its own rows alone, and it has none until its load has been observed. First halves have the product's dtype
here, as in peft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear as product_of

from gapless.kernels.activation_triton import triton_activate
from gapless.kernels.few_rows import rotate_and_attend, weights
from gapless.kernels.kinds import Activation
from gapless.kernels.linear import TorchLinear
from gapless.kernels.norm_triton import triton_add_rms_norm, triton_rms_norm
from gapless.kernels.seam import FastWay, LayerProduct
from gapless.kernels.views import Attend, LayerRows, Rotation

MOST_JOINED_ROWS = 256
"""Most rows that each read their own adapter; for more, kernels with shared reads are faster."""


def _is_joined(product: LayerProduct) -> bool:
    plain, part = product
    if part is None or not isinstance(plain, TorchLinear):
        return False
    return part.down.data_ptr() == plain.weight.data_ptr() + plain.weight.nbytes


def most_rows(products: Sequence[LayerProduct]) -> int:
    """Return the most rows that a model runs this way: 0 unless the tables of all products are below matrices."""
    return MOST_JOINED_ROWS if all(map(_is_joined, products)) else 0


def _whole(front: Tensor, size: int) -> Tensor:
    """Return `front` extended to the lines or numbers after it in memory, `size` in all."""
    return front.as_strided((size, *front.shape[1:]), front.stride())


class Joint(NamedTuple):
    """A product without its adapter terms, with their first half for every slot."""

    product: Tensor
    """[rows, out]"""
    inner: Tensor
    """[rows, slots, projections * rank]"""
    slots: Tensor
    """int64 [rows]"""
    up: Tensor
    """See `AdapterPart`"""


class JoinedOps:
    """Implements `LayerOps`. `y` is normed."""

    def __init__(self, x: Tensor, rows: LayerRows, eps: float) -> None:
        self.x, self.rows, self.eps = x, rows, eps

    def norm(self, weight: Tensor) -> Tensor:
        found: Tensor = triton_rms_norm(self.x, weight, self.eps)
        return found

    def product(self, y: Tensor, product: LayerProduct) -> Joint:
        part, slots, (weight, bias) = product.part, self.rows.adapters, weights(product.linear)
        assert part is not None and slots is not None
        count, lines, _ = part.down.shape
        size = len(weight) + count * lines
        found = product_of(y, _whole(weight, size), None if bias is None else _whole(bias, size))
        return Joint(found[:, : len(weight)], found[:, len(weight) :].view(-1, count, lines), slots, part.up)

    def attend(self, qkv: Joint, rotation: Rotation, layer: int, attend: Attend) -> Tensor:
        kv, product = self.rows.kv(layer), qkv.product
        product = product.view(len(product), -1, kv.head_dim)
        return rotate_and_attend(product, rotation, kv, self.rows, attend, *qkv[1:])

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        delta, *adapted = self.product(y, product)
        found: Tensor = triton_add_rms_norm(self.x, delta, norm, self.eps, *adapted)
        return found

    def gated(self, y: Tensor, product: LayerProduct) -> Tensor:
        y, *adapted = self.product(y, product)
        found: Tensor = triton_activate(y, Activation.SILU, True, *adapted)
        return found

    def end(self, y: Tensor) -> Tensor:
        return y


JOINED_ROWS = FastWay(JoinedOps, most_rows, adapts=True)
