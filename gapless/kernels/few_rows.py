"""Decoder layers of few rows of one token each on CUDA: `LayerOps` by operators of torch that fuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gapless.comm.seam import Group
from gapless.kernels.adapt import AdapterPart
from gapless.kernels.adapt_fused_triton import AdapterWork, adapted_norm, shares_of
from gapless.kernels.attention_triton import rotated_decode, triton_decode_attention
from gapless.kernels.few_rows_triton import MOST_FEW_ROWS, MOST_FEW_WEIGHT, launch
from gapless.kernels.library_triton import arch, operator
from gapless.kernels.linear import TorchLinear
from gapless.kernels.matrix import Linear
from gapless.kernels.norm_triton import triton_rms_norm
from gapless.kernels.rope_triton import triton_rope_and_write
from gapless.kernels.seam import FastWay, LayerProduct
from gapless.kernels.views import KV, Attend, LayerRows, Rotation

LEAST_STREAM_WEIGHT = 32 << 20
"""A model with a matrix of at least this many elements has the products of `stream_triton` for several rows: measured
for Qwen3 of 4B and 8B."""


def normed_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """Return rms_norm(x [M, K]) @ weight.T + bias [M, N], or [M, N // 2] after SiLU times gate."""
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
    launch(x, weight, bias, out, norm=norm, eps=eps, gated=gated)
    return out


def linear_add(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Do x [M, N] += y [M, K] @ weight.T + bias, in place and rounded once."""
    launch(y, weight, bias, x, add=True)


def one_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x [1, K] @ weight.T + bias to `out`."""
    launch(x, weight, bias, out)


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """Return x [M, K] @ weight.T + bias [M, N], or [M, N // 2] after SiLU times gate."""
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
    launch(x, weight, bias, out, gated=gated)
    return out


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, inner: Tensor, slots: Tensor, up: Tensor,
    ends: list[int],
) -> Tensor:  # fmt: skip
    """Return x @ weight.T + bias + inner @ up, by each row's slot, or [M, N // 2] after SiLU times gate."""
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
    launch(x, weight, bias, out, gated=gated, beside=AdapterWork(up, inner, slots, tuple(ends)))
    return out


def adapted_linear_add(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, down: Tensor
) -> Tensor:
    """Do `linear_add`; return y @ down.T by each row's slot, as [shares, M, rank] float32."""
    inner = torch.empty((shares_of(y.shape[1], len(y)), len(y), down.shape[1]), dtype=torch.float32, device=y.device)
    launch(y, weight, bias, x, add=True, beside=AdapterWork(down, inner, slots, (x.shape[1],)))
    return inner


triton_adapted_norm = operator(adapted_norm)
triton_adapted_linear = operator(adapted_linear)
triton_adapted_linear_add = operator(adapted_linear_add, "x")
triton_normed_linear = operator(normed_linear)
triton_linear_add = operator(linear_add, "x")
triton_few_linear = operator(few_linear)
triton_one_row_linear = operator(one_row_linear, "out")
triton_rotated_decode = operator(rotated_decode, "cache")


def weights(linear: Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a product that this way serves."""
    assert isinstance(linear, TorchLinear)
    return linear.weight, linear.bias


def rotate_and_attend(
    qkv: Tensor, rotation: Rotation, kv: KV, rows: LayerRows, attend: Attend, *adapted: Tensor
) -> Tensor:
    """Do `LayerOps.attend` of qkv [T, Q + 2K, D] in two launches, for rows that may read what others write.

    adapted: see `rope_triton.rope_and_write`."""
    batch = rows.batch
    triton_rope_and_write(qkv, *rotation, rows.slots, kv.cache, kv.layer, kv.scales, *adapted)
    q = qkv[:, : -2 * kv.cache.shape[4]]
    found: Tensor = triton_decode_attention(q, *kv, batch.rows, batch.kv_lens, *attend)
    return found


class FewRowsLinear(TorchLinear):
    """Torch's product, except for one row, which has a kernel of its own."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[0] != 1:  # no row if a chunk ends before its prompt
            return super().__call__(x, out)
        out = x.new_empty(1, self.weight.shape[0]) if out is None else out
        triton_one_row_linear(x, self.weight, self.bias, out)
        return out


def most_rows(products: Sequence[LayerProduct]) -> int:
    """Return the most rows of a model of these products that are faster here. One row always is, by plain weights: they
    are read as fast, in fewer launches."""
    weights = [plain.weight for plain, _ in products if isinstance(plain, TorchLinear)]
    if len(weights) < len(products):
        return 0
    return MOST_FEW_ROWS if all(weight.numel() <= MOST_FEW_WEIGHT for weight in weights) else 1


def streams(products: Sequence[LayerProduct]) -> bool:
    """Return whether a model of these products runs several rows by `stream.StreamOps`: on Hopper, large ones do."""
    weights = [plain.weight for plain, _ in products if isinstance(plain, TorchLinear)]
    large = len(weights) == len(products) and any(weight.numel() >= LEAST_STREAM_WEIGHT for weight in weights)
    return large and arch(weights[0].device).wgmma


def most_plain_rows(products: Sequence[LayerProduct]) -> int:
    """Return the most rows without adapters."""
    return 1 if streams(products) else most_rows(products)


class FewRowsOps:
    """Implements `LayerOps` in few launches: a product norms its own input. For few rows the result is the same from
    one power of two to the next. `y` is the weight of a norm that is not done yet."""

    def __init__(self, x: Tensor, rows: LayerRows, eps: float) -> None:
        self.x, self.rows, self.eps = x, rows, eps

    def norm(self, weight: Tensor) -> Tensor:
        return weight

    def product(self, y: Tensor, product: LayerProduct) -> Tensor:
        return self._product(y, product, False)

    def gated(self, y: Tensor, product: LayerProduct) -> Tensor:
        return self._product(y, product, True)

    def _product(self, weight: Tensor, product: LayerProduct, gated: bool) -> Tensor:
        found: Tensor = triton_normed_linear(self.x, weight, self.eps, *weights(product.linear), gated)
        return found

    def attend(self, qkv: Tensor, rotation: Rotation, layer: int, attend: Attend) -> Tensor:
        kv, batch = self.rows.kv(layer), self.rows.batch
        qkv = qkv.view(len(qkv), -1, kv.head_dim)
        if not self.rows.apart:
            return rotate_and_attend(qkv, rotation, kv, self.rows, attend)
        found: Tensor = triton_rotated_decode(qkv, *rotation, self.rows.slots, *kv, batch.rows, batch.kv_lens, *attend)
        return found

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        triton_linear_add(self.x, y, *weights(product.linear))
        return norm

    def end(self, y: Tensor) -> Tensor:
        found: Tensor = triton_rms_norm(self.x, y, self.eps)
        return found


class SharedFewRowsOps(FewRowsOps):
    """Operations of a rank with a share of each layer: the sum over ranks adds to x and norms it. `y` is normed."""

    linear = staticmethod(triton_few_linear)

    def __init__(self, group: Group, x: Tensor, rows: LayerRows, eps: float) -> None:
        super().__init__(x, rows, eps)
        self.group = group

    def norm(self, weight: Tensor) -> Tensor:
        found: Tensor = triton_rms_norm(self.x, weight, self.eps)
        return found

    def _product(self, y: Tensor, product: LayerProduct, gated: bool) -> Tensor:
        found: Tensor = self.linear(y, *weights(product.linear), gated)
        return found

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        return self.group.add_norm(self.x, self._product(y, product, False), norm, self.eps)

    def end(self, y: Tensor) -> Tensor:
        return y


class AdaptedOps(FewRowsOps):
    """Operations of few rows, some with adapters. The next norm adds what adapters give to x."""

    def __init__(self, x: Tensor, rows: LayerRows, eps: float) -> None:
        self._x = x
        self.rows, self.eps = rows, eps
        self.left: tuple[Tensor, Tensor, Tensor] | None = None
        """The first half of the terms that x lacks (float32 [shares, T, rank]), the tables of their second half, and
        the weight of the norm that adds them"""

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        if self.left is not None:
            self._normed(self.left[2], None)
        return self._x

    def _normed(self, weight: Tensor, part: AdapterPart | None) -> tuple[Tensor, Tensor]:
        """Complete x. Return its norm, and the first half [T, lines] of `part`'s terms for a product of it."""
        before, up, _ = self.left or (None, None, None)
        down, projections = (None, 0) if part is None else (part.down, len(part.ends))
        changed, y, inner = triton_adapted_norm(
            self._x, before, up, self.rows.adapters, weight, self.eps, down, projections
        )
        if self.left is not None:
            self._x, self.left = changed, None
        return y, inner

    def _product(self, weight: Tensor, product: LayerProduct, gated: bool) -> Tensor:
        part = product.part
        assert part is not None
        y, inner = self._normed(weight, part)
        found: Tensor = triton_adapted_linear(
            y, *weights(product.linear), gated, inner, self.rows.adapters, part.up, list(part.ends)
        )
        return found

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        part = product.part
        assert part is not None
        inner = triton_adapted_linear_add(self._x, y, *weights(product.linear), self.rows.adapters, part.down)
        self.left = inner, part.up, norm
        return norm

    def end(self, y: Tensor) -> Tensor:
        return self._normed(y, None)[0]


FEW_ROWS = FastWay(FewRowsOps, most_plain_rows, shared=SharedFewRowsOps)
FEW_ADAPTED_ROWS = FastWay(AdaptedOps, most_rows, adapts=True)
