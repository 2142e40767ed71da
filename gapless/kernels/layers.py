"""The general way through decoder layers: the vocabulary of `seam.LayerOps`, one operation after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gapless.comm.seam import Group
from gapless.kernels.kinds import Activation
from gapless.kernels.seam import Kernels, LayerProduct
from gapless.kernels.views import Attend, LayerRows, NormWeights, Rotation


class SeparateOps:
    """The general way: one operation after the other, for any rows, weights and kernels. Implements `LayerOps`.

    `norm`, `product` and `gated` return tensors, so that a forward of another kind can compute between them.
    """

    def __init__(
        self, x: Tensor, rows: LayerRows, eps: float, kernels: Kernels,
        attention: Callable[[Tensor, int, Attend], Tensor], centered: bool = False,
    ) -> None:  # fmt: skip
        """`attention`: (q [T, Q, D], layer, attend) -> [T, Q * D], with the cache written. centered: `normed` is a
        LayerNorm."""
        self.x, self.rows, self.eps, self.kernels, self.attention = x, rows, eps, kernels, attention
        self.centered = centered

    def norm(self, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(self.x, weight, self.eps)

    def normed(self, x: Tensor, norm: NormWeights | None) -> Tensor:
        """Return the norm of any rows [T, H]: x itself without weights."""
        if norm is None:
            return x
        if self.centered:
            return self.kernels.layer_norm(x, *norm, self.eps)
        return self.kernels.rms_norm(x, norm.weight, self.eps)

    def activated(self, x: Tensor, kind: Activation, gated: bool) -> Tensor:
        """Return the function of x [T, I], or of its left half [T, 2I] times the right one."""
        return self.kernels.activate(x, kind, gated)

    def product(self, y: Tensor, product: LayerProduct) -> Tensor:
        found = product.linear(y)
        if self.rows.adapters is not None and product.part is not None:
            self.kernels.adapt(y, found, self.rows.adapters, product.part)
        return found

    def summed(self, y: Tensor, product: LayerProduct) -> Tensor:
        """Return the product of y with the inputs of all ranks."""
        return self.product(y, product)

    def whole_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of rows [T, C] by `weight` [C], over the columns of all ranks."""
        return self.kernels.rms_norm(x, weight, self.eps)

    def write(self, qkv: Tensor, rotation: Rotation, layer: int) -> Tensor:
        """Do the first part of `attend`; return qkv [T, Q + 2K, D]."""
        kv = self.rows.kv(layer)
        qkv = qkv.view(len(qkv), -1, kv.head_dim)
        self.kernels.rope_and_write(qkv, rotation, kv, self.rows.slots)
        return qkv

    def attend(self, qkv: Tensor, rotation: Rotation, layer: int, attend: Attend) -> Tensor:
        q = self.write(qkv, rotation, layer)[:, : -2 * self.rows.cache.shape[4]]
        return self.attention(q, layer, attend)

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        return self.kernels.add_rms_norm(self.x, self.product(y, product), norm, self.eps)

    def gated(self, y: Tensor, product: LayerProduct) -> Tensor:
        return self.kernels.activate(self.product(y, product), Activation.SILU, True)

    def end(self, y: Tensor) -> Tensor:
        return y


class SharedOps(SeparateOps):
    """The general way of a rank with a share of each layer's heads and MLP."""

    def __init__(
        self, group: Group, x: Tensor, rows: LayerRows, eps: float, kernels: Kernels,
        attention: Callable[[Tensor, int, Attend], Tensor], centered: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(x, rows, eps, kernels, attention, centered)
        self.group = group

    def summed(self, y: Tensor, product: LayerProduct) -> Tensor:
        return self.group.add(self.product(y, product))

    def whole_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        mean = self.group.add(wide.square().mean(1, keepdim=True)) / self.group.share.world
        return (wide * torch.rsqrt(mean + self.eps) * weight).to(x.dtype)

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        return self.group.add_norm(self.x, self.product(y, product), norm, self.eps)
