"""Linear layers of quantised weights on CUDA, alone and in a way of few launches for few rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from gapless.kernels import few_rows
from gapless.kernels.coded_triton import (
    CHUNK_BYTES,
    triton_coded_gated_linear,
    triton_coded_linear,
    triton_coded_linear_add,
    triton_coded_normed_linear,
    triton_decoded,
)
from gapless.kernels.few_rows import FewRowsOps
from gapless.kernels.fp8_rows_triton import triton_fp8_rows
from gapless.kernels.kinds import WeightKind
from gapless.kernels.library_triton import arch
from gapless.kernels.linear import TorchLinear
from gapless.kernels.matrix import Matrix
from gapless.kernels.quantised_triton import FP8, INT4, INT8
from gapless.kernels.seam import FastWay, LayerProduct

MOST_CODED_ROWS = 64
"""Most rows by the kernel here, and of FP8 by groups:"""
MOST_GROUPED_ROWS = 512
"""More rows take less time in torch's products: the scaled one of FP8, or the plain one of decoded weights."""
DECODED_BYTES = 32 << 20
"""Bytes of a weight that are decoded at a time: they stay in the L2 cache"""
MOST_FUSED_ROWS = 32
"""Most rows whose norms, gates and sums are joined with products by quantised weights"""
CODES = {WeightKind.FP8: FP8.value, WeightKind.INT8: INT8.value, WeightKind.INT4: INT4.value}


class CodedLinear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out] of a weight that stays in its codes on the device.

    One row is multiplied as it is. More rows for an FP8 weight are rounded to E4M3 first, each by its own scale, if the
    GPU multiplies these. A row's bits follow from itself, the weight and the number of rows.
    """

    kind: WeightKind

    def __init__(self, matrix: Matrix) -> None:
        self.weight, self.scale, *rest = matrix.tensors
        self.zero = rest[0] if rest else None
        self.bias, self.dtype = matrix.bias, matrix.dtype
        self.code = [CODES[matrix.layout.kind], matrix.layout.group]
        self.codes = self.weight.view(torch.uint8)

    @property
    def rounds(self) -> bool:
        """True if inputs of several rows are rounded to E4M3."""
        return self.kind is WeightKind.FP8 and arch(self.weight.device).has_e4m3

    @classmethod
    def of(cls, matrix: Matrix) -> Self | None:
        codes, group = matrix.tensors[0], matrix.layout.group
        if codes.shape[1] % CHUNK_BYTES or group % (16 if matrix.layout.kind is WeightKind.INT8 else 32):
            return None
        if not all(tensor.is_contiguous() for tensor in matrix.tensors):
            matrix = matrix._replace(tensors=tuple(tensor.contiguous() for tensor in matrix.tensors))
        return cls(matrix)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, outputs = x.shape[0], len(self.codes)
        out = x.new_empty(rows, outputs) if out is None else out
        if rows == 0:  # if a chunk ends before its prompt
            return out
        x = x.contiguous()
        few = rows <= MOST_CODED_ROWS
        if self.rounds and rows > 1 and (few or not self.code[1] or rows <= MOST_GROUPED_ROWS):
            codes, factor = triton_fp8_rows(x, None, 0.0)
            if few or self.code[1] or outputs % 16 or out.dtype != torch.bfloat16:
                triton_coded_linear(codes, factor, self.codes, self.scale, None, self.bias, self.code, out)
            else:
                torch._scaled_mm(
                    codes, self.weight.t(), factor, self.scale.t(), self.bias, None, out.dtype, True, out=out
                )
        elif few:
            triton_coded_linear(x, None, self.codes, self.scale, self.zero, self.bias, self.code, out)
        else:
            self._decoded(x, out)
        return out

    def _decoded(self, x: Tensor, out: Tensor) -> None:
        """Write the product to `out` by pieces of the weight, each decoded before it is multiplied."""
        size = max(1, DECODED_BYTES // (x.shape[1] * x.element_size() * 256)) * 256  # torch's tiles are whole
        piece = x.new_empty(min(size, len(self.codes)), x.shape[1])
        for first in range(0, len(self.codes), size):
            own = slice(first, min(first + size, len(self.codes)))
            weight = piece[: own.stop - first]
            triton_decoded(
                self.codes[own], self.scale[own], None if self.zero is None else self.zero[own], self.code, weight
            )
            if self.bias is None:
                torch.mm(x, weight.t(), out=out[:, own])
            else:
                torch.addmm(self.bias[own], x, weight.t(), out=out[:, own])


class CodedFp8Linear(CodedLinear):
    kind = WeightKind.FP8


class CodedInt8Linear(CodedLinear):
    kind = WeightKind.INT8


class CodedInt4Linear(CodedLinear):
    kind = WeightKind.INT4


CODED_PRODUCTS = {linear.kind: linear for linear in (CodedFp8Linear, CodedInt8Linear, CodedInt4Linear)}
"""The products by quantised weights for models of 16-bit numbers"""


def most_rows(products: Sequence[LayerProduct]) -> int:
    """Return the most rows of a model that has quantised weights, and perhaps plain ones: 0 for any others."""
    coded = [product for product in products if isinstance(product.linear, CodedLinear)]
    plain = [product for product in products if isinstance(product.linear, TorchLinear)]
    if not coded or len(coded) + len(plain) < len(products):
        return 0
    return min(MOST_FUSED_ROWS, few_rows.most_rows(plain))


class CodedOps(FewRowsOps):
    """Implements `LayerOps` in few launches for quantised weights, with plain ones between them."""

    def _product(self, weight: Tensor, product: LayerProduct, gated: bool) -> Tensor:
        linear = product.linear
        if not isinstance(linear, CodedLinear):
            return super()._product(weight, product, gated)
        if not linear.rounds or len(self.x) == 1:
            found: Tensor = triton_coded_normed_linear(
                self.x, weight, self.eps, linear.codes, linear.scale, linear.zero, linear.bias, linear.code, gated
            )
            return found
        codes, factor = triton_fp8_rows(self.x, weight, self.eps)
        out = self.x.new_empty(len(codes), len(linear.codes) // (2 if gated else 1))
        if gated:
            triton_coded_gated_linear(codes, factor, linear.codes, linear.scale, linear.bias, linear.code, out)
        else:
            triton_coded_linear(codes, factor, linear.codes, linear.scale, None, linear.bias, linear.code, out)
        return out

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Tensor:
        linear = product.linear
        if not isinstance(linear, CodedLinear):
            return super().add(y, product, norm)
        factor = None
        if linear.rounds and len(y) > 1:
            y, factor = triton_fp8_rows(y, None, 0.0)
        triton_coded_linear_add(self.x, y, factor, linear.codes, linear.scale, linear.zero, linear.bias, linear.code)
        return norm


CODED_ROWS = FastWay(CodedOps, most_rows)
