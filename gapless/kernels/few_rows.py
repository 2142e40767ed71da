"""A decoder layer for a batch of few rows on CUDA: the seam's `FewRows` as operators of torch."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from gapless.kernels import linear as plain
from gapless.kernels.attention_triton import rotated_decode
from gapless.kernels.few_rows_triton import MOST_ROWS, launch
from gapless.kernels.library_triton import operator
from gapless.kernels.seam import FewRows, Linear
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch


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


triton_normed_linear = operator(
    "triton_normed_linear(Tensor x, Tensor norm, float eps, Tensor weight, Tensor? bias, bool gated) -> Tensor",
    normed_linear,
)
triton_linear_add = operator("triton_linear_add(Tensor(a!) x, Tensor y, Tensor weight, Tensor? bias) -> ()", linear_add)
triton_one_row_linear = operator(
    "triton_one_row_linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()", one_row_linear
)
triton_rotated_decode = operator(
    "triton_rotated_decode(Tensor qkv, Tensor? qk_norm, float eps, Tensor positions, Tensor table, Tensor slots, "
    "Tensor(a!) cache, int layer, Tensor page_table, Tensor rows, Tensor kv_lens, float scale) -> Tensor",
    rotated_decode,
)


class FewRowsLinear(plain.TorchLinear):
    """Torch's product, except for one row, which has a kernel of its own."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[0] != 1:  # none, where a chunk ends before its prompt does
            return super().__call__(x, out)
        out = x.new_empty(1, self.weight.shape[0]) if out is None else out
        triton_one_row_linear(x, self.weight, self.bias, out)
        return out


def _normed(gated: bool, x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
    assert isinstance(linear, plain.TorchLinear)
    found: Tensor = triton_normed_linear(x, norm, eps, linear.weight, linear.bias, gated)
    return found


def _add(x: Tensor, y: Tensor, linear: Linear) -> None:
    assert isinstance(linear, plain.TorchLinear)
    triton_linear_add(x, y, linear.weight, linear.bias)


def _decode(qkv: Tensor, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float) -> Tensor:
    qk_norm, eps, table = rotation
    found: Tensor = triton_rotated_decode(
        qkv, qk_norm, eps, tokens.positions, table, tokens.slots, *kv, batch.rows, batch.kv_lens, scale
    )
    return found


FEW_ROWS = FewRows(MOST_ROWS, partial(_normed, False), partial(_normed, True), _add, _decode)
