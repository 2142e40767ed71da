"""Decoder layers of few rows and large weights on CUDA: `LayerOps` by products of stream K."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gapless.kernels import stream_triton
from gapless.kernels.few_rows import FewRowsOps, SharedFewRowsOps, streams, weights
from gapless.kernels.few_rows_triton import MOST_FEW_ROWS
from gapless.kernels.library_triton import arch, operator
from gapless.kernels.norm_triton import rms_norm
from gapless.kernels.seam import FastWay, LayerProduct
from gapless.kernels.views import LayerRows


def early_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [M, N], by a kernel that may begin early."""
    return rms_norm(x, weight, eps, early=arch(x.device).early)


def stream_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """Return x [M, K] @ weight.T + bias [M, N], or [M, N // 2] after SiLU times gate."""
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
    stream_triton.launch(x, weight, bias, out, gated=gated)
    return out


def stream_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Return the parts of x [M, K] @ weight.T for `stream_add_norm`."""
    return stream_triton.launch(x, weight, None, None)


def stream_add_norm(x: Tensor, parts: Tensor, depth: int, bias: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add the product of inputs [M, depth] and bias to x [M, N] in place; return the norm of the sum."""
    return stream_triton.add_norm(x, parts, depth, bias, weight, eps)


triton_early_norm = operator(early_norm)
triton_stream_linear = operator(stream_linear)
triton_stream_parts = operator(stream_parts)
triton_stream_add_norm = operator(stream_add_norm, "x")


class Left(NamedTuple):
    """A product that x lacks."""

    parts: Tensor
    depth: int
    bias: Tensor | None
    norm: Tensor
    """The weight of the norm that adds it"""


class StreamOps(FewRowsOps):
    """Operations of few rows by large weights. The next norm adds the sums that a product leaves."""

    def __init__(self, x: Tensor, rows: LayerRows, eps: float) -> None:
        self._x = x
        self.rows, self.eps = rows, eps
        self.left: Left | None = None

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        if self.left is not None:
            self._normed(self.left.norm)
        return self._x

    def _normed(self, weight: Tensor) -> Tensor:
        """Complete x, and return its norm."""
        left, self.left = self.left, None
        if left is None:
            found: Tensor = triton_early_norm(self._x, weight, self.eps)
        else:
            found = triton_stream_add_norm(self._x, left.parts, left.depth, left.bias, weight, self.eps)
        return found

    def _product(self, weight: Tensor, product: LayerProduct, gated: bool) -> Tensor:
        found: Tensor = triton_stream_linear(self._normed(weight), *weights(product.linear), gated)
        return found

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        weight, bias = weights(product.linear)
        self.left = Left(triton_stream_parts(y, weight), y.shape[1], bias, norm)
        return norm

    def end(self, y: Tensor) -> Tensor:
        return self._normed(y)


class SharedStreamOps(SharedFewRowsOps):
    """Operations of few rows by a rank's share of large weights."""

    linear = staticmethod(triton_stream_linear)


def most_rows(products: Sequence[LayerProduct]) -> int:
    """Return the most rows that a model of these products runs this way."""
    return MOST_FEW_ROWS if streams(products) else 0


STREAM_ROWS = FastWay(StreamOps, most_rows, shared=SharedStreamOps)
