"""A linear layer that keeps its weight in the layout its device likes best."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from gapless.device import facts
from gapless.kernels.kinds import WeightKind
from gapless.kernels.matrix import Matrix

SIZES_A_DOUBLING = 4
"""Row counts between a power of two and the next that oneDNN sees. It keeps a quarter to half a megabyte for each of
them and each shape of a weight: without padding, short streams on the demo took a gigabyte."""


class TorchLinear:
    """A layer x [N, in] -> x @ weight.T + bias [N, out].

    On a CPU the weight is copied into oneDNN's blocked layout, if that exists: a step of one to eight rows then takes
    about half the time. The packed tensor is opaque: no other code can use its storage. Rows are padded with zeros to a
    few row counts: oneDNN compiles code for every count that it sees, and keeps it.
    """

    kind = WeightKind.DENSE

    @classmethod
    def of(cls, matrix: Matrix) -> Self:
        return cls(matrix.tensors[0], matrix.bias)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = packs(weight)
        self.half = not self.packed and facts.on_host(weight) and weight.dtype == torch.float16
        """Whether oneDNN multiplies, in the plain layout"""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.packed or self.half:
            found = self._filled_up(x)
            return found if out is None else out.copy_(found)
        if out is None:
            return linear(x, self.weight, self.bias)
        # The function behind `linear`, which takes no `out`.
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def _filled_up(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        added = filled_up(rows) - rows
        x = pad(x, (0, 0, 0, added)) if added else x
        if self.packed:
            found: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        else:
            found = linear(x, self.weight, self.bias)
        return found[:rows] if added else found


def filled_up(rows: int) -> int:
    """Round up to a power of two, or to one of the SIZES_A_DOUBLING numbers from there to the next."""
    step = max(1, (1 << (rows - 1).bit_length()) // (2 * SIZES_A_DOUBLING))
    return -(-rows // step) * step


NEEDED = ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_reorder_linear_weight")
"""Internal operators of torch. If a version drops one, the plain layout serves."""


def packs(weight: Tensor) -> bool:
    if not facts.on_host(weight) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in NEEDED):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
