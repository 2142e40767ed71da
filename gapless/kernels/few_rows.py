"""A decoder layer for a batch of few rows on CUDA: the seam's `FusedRows` as operators of torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gapless.kernels.adapt import AdapterPart, Shrunk
from gapless.kernels.adapt_fused_triton import AdapterWork, adapted_norm, shares_of
from gapless.kernels.attention_triton import rotated_decode
from gapless.kernels.few_rows_triton import MOST_FEW_ROWS, MOST_FEW_WEIGHT, launch
from gapless.kernels.library_triton import operator
from gapless.kernels.linear import TorchLinear, weights
from gapless.kernels.seam import AdaptedRows, FusedRows, Linear
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
triton_one_row_linear = operator(one_row_linear, "out")
triton_rotated_decode = operator(rotated_decode, "cache")


class FewRowsLinear(TorchLinear):
    """Torch's product, except for one row, which has a kernel of its own."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[0] != 1:  # no row if a chunk ends before its prompt
            return super().__call__(x, out)
        out = x.new_empty(1, self.weight.shape[0]) if out is None else out
        triton_one_row_linear(x, self.weight, self.bias, out)
        return out


def _serves(linear: Linear) -> bool:
    return weights(linear)[0].numel() <= MOST_FEW_WEIGHT


def _normed(gated: bool, x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
    found: Tensor = triton_normed_linear(x, norm, eps, *weights(linear), gated)
    return found


def _add(x: Tensor, y: Tensor, linear: Linear) -> None:
    triton_linear_add(x, y, *weights(linear))


def _decode(qkv: Tensor, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float) -> Tensor:
    qk_norm, eps, table = rotation
    found: Tensor = triton_rotated_decode(
        qkv, qk_norm, eps, tokens.positions, table, tokens.slots, *kv, batch.rows, batch.kv_lens, scale
    )
    return found


def _norm(
    x: Tensor, added: Shrunk | None, norm: Tensor, eps: float, slots: Tensor, part: AdapterPart | None
) -> tuple[Tensor, Tensor, Shrunk | None]:
    before, up = (None, None) if added is None else (added.inner, added.part.up)
    down, projections = (None, 0) if part is None else (part.down, len(part.ends))
    changed, y, inner = triton_adapted_norm(x, before, up, slots, norm, eps, down, projections)
    return x if added is None else changed, y, None if part is None else Shrunk(inner[None], slots, part)


def _adapted(gated: bool, x: Tensor, added: Shrunk, linear: Linear) -> Tensor:
    inner, slots, part = added
    found: Tensor = triton_adapted_linear(x, *weights(linear), gated, inner[0], slots, part.up, list(part.ends))
    return found


def _adapted_add(x: Tensor, y: Tensor, linear: Linear, slots: Tensor, part: AdapterPart) -> Shrunk:
    inner = triton_adapted_linear_add(x, y, *weights(linear), slots, part.down)
    return Shrunk(inner, slots, part)


ADAPTED_ROWS = AdaptedRows(_norm, partial(_adapted, False), partial(_adapted, True), _adapted_add)
FEW_ROWS = FusedRows(
    MOST_FEW_ROWS, _serves, partial(_normed, False), partial(_normed, True), _add, _decode, ADAPTED_ROWS
)
