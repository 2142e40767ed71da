"""A decoder layer for a decode batch of 33 to 256 rows on Hopper: the seam's `ManyRows` as operators of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels import linear as plain
from gapless.kernels import many_rows_triton
from gapless.kernels.attention_triton import triton_decode_attention
from gapless.kernels.library_triton import has_large_blocks, is_hopper, operator
from gapless.kernels.many_rows_triton import MOST_ROWS, Following, launch, tiles_for
from gapless.kernels.rope_triton import triton_rope_and_write
from gapless.kernels.seam import Linear, ManyRows, Normable
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch


def divided_linear(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None, gated: bool
) -> Tensor:
    """Return x [M, K] @ weight.T / root of the mean of `squares` + bias: [M, N], or [M, N // 2] after SiLU x gate."""
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
    tiles = tiles_for(x.shape[0], weight.shape[0], gated)
    launch(x, weight, bias, out, tiles, squares=squares, eps=eps, gated=gated)
    return out


def linear_add_square(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Do x [M, N] += y [M, K] @ weight.T + bias, rounded once; return x * norm, and sums of squares of x [M, S]."""
    tiles = tiles_for(y.shape[0], weight.shape[0])
    squares = torch.empty((len(x), -(-x.shape[1] // tiles.columns)), dtype=torch.float32, device=x.device)
    following = Following(norm, torch.empty_like(x), squares)
    launch(y, weight, bias, x, tiles, following=following)
    return following.scaled, squares


triton_divided_linear = operator(
    "triton_divided_linear(Tensor x, Tensor? squares, float eps, Tensor weight, Tensor? bias, bool gated) -> Tensor",
    divided_linear,
)
triton_linear_add_square = operator(
    "triton_linear_add_square(Tensor(a!) x, Tensor y, Tensor weight, Tensor? bias, Tensor norm) -> (Tensor, Tensor)",
    linear_add_square,
)


def _serves(linear: Linear) -> bool:
    assert isinstance(linear, plain.TorchLinear)
    weight = linear.weight
    fits = is_hopper(weight.device) and has_large_blocks(weight.device)
    return weight.dtype == torch.bfloat16 and fits and many_rows_triton.serves(weight)


def _linear(x: Normable, eps: float, linear: Linear, gated: bool = False) -> Tensor:
    assert isinstance(linear, plain.TorchLinear)
    found: Tensor = triton_divided_linear(*x, eps, linear.weight, linear.bias, gated)
    return found


def _silu_mul(x: Normable, eps: float, linear: Linear) -> Tensor:
    return _linear(x, eps, linear, gated=True)


def _add(x: Tensor, y: Tensor, linear: Linear, norm: Tensor) -> Normable:
    assert isinstance(linear, plain.TorchLinear)
    return Normable(*triton_linear_add_square(x, y, linear.weight, linear.bias, norm))


def _decode(qkv: Tensor, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float) -> Tensor:
    qk_norm, eps, table = rotation
    triton_rope_and_write(
        qkv, qk_norm, eps, tokens.positions, table, tokens.slots, kv.cache, kv.layer, early=is_hopper(qkv.device)
    )
    q = qkv[:, : -2 * kv.cache.shape[4]]
    found: Tensor = triton_decode_attention(q, *kv, batch.rows, batch.kv_lens, scale)
    return found


MANY_ROWS = ManyRows(MOST_ROWS, _serves, _linear, _silu_mul, _add, _decode)
