"""A decoder layer for a decode batch of 33 to 256 rows on Hopper: the seam's `FusedRows` as operators of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels import many_rows_triton
from gapless.kernels.activation_triton import triton_silu_mul
from gapless.kernels.adapt import AdapterPart, Shrunk
from gapless.kernels.adapt_fused_triton import AdapterWork, shares_of
from gapless.kernels.attention_triton import triton_decode_attention
from gapless.kernels.few_rows import norm_with_adapters
from gapless.kernels.library_triton import arch, operator
from gapless.kernels.linear import weights
from gapless.kernels.many_rows_triton import MOST_MANY_ROWS, Following, launch, tiles_for
from gapless.kernels.norm_triton import triton_rms_norm
from gapless.kernels.rope_triton import triton_rope_and_write
from gapless.kernels.seam import AdaptedRows, FusedRows, Linear, Normable
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


def linear_add_beside(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, down: Tensor) -> Tensor:
    """Do x [M, N] += y [M, K] @ weight.T + bias, rounded once; return y @ down.T by each row's slot, as [shares, M,
    rank] float32."""
    inner = torch.empty((shares_of(y.shape[1], len(y)), len(y), down.shape[1]), dtype=torch.float32, device=y.device)
    beside = AdapterWork(down, inner, slots, (x.shape[1],))
    launch(y, weight, bias, x, tiles_for(y.shape[0], weight.shape[0]), beside=beside)
    return inner


triton_divided_linear = operator(divided_linear)
triton_linear_add_square = operator(linear_add_square, "x")
triton_linear_add_beside = operator(linear_add_beside, "x")


def _serves(linear: Linear) -> bool:
    weight, _ = weights(linear)
    gpu = arch(weight.device)
    return weight.dtype == torch.bfloat16 and gpu.early and gpu.large_blocks and many_rows_triton.serves(weight)


def _first(x: Tensor, norm: Tensor, eps: float) -> Normable:
    return Normable(triton_rms_norm(x, norm, eps))


def _linear(x: Normable, eps: float, linear: Linear, gated: bool = False) -> Tensor:
    found: Tensor = triton_divided_linear(x.rows, x.squares, eps, *weights(linear), gated)
    return found


def _silu_mul(x: Normable, eps: float, linear: Linear) -> Tensor:
    return _linear(x, eps, linear, gated=True)


def _add(x: Tensor, y: Tensor, linear: Linear, norm: Tensor) -> Normable:
    scaled, squares = triton_linear_add_square(x, y, *weights(linear), norm)
    return Normable(scaled, None, squares)


def _decode(qkv: Tensor, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float) -> Tensor:
    qk_norm, eps, table = rotation
    triton_rope_and_write(
        qkv, qk_norm, eps, tokens.positions, table, tokens.slots, kv.cache, kv.layer, early=arch(qkv.device).early
    )
    q = qkv[:, : -2 * kv.cache.shape[4]]
    found: Tensor = triton_decode_attention(q, *kv, batch.rows, batch.kv_lens, scale)
    return found


def _bare_linear(x: Tensor, added: Shrunk, linear: Linear) -> Tensor:
    return _linear(Normable(x), 0.0, linear)


def _rotate(qkv: Tensor, added: Shrunk, rotation: Rotation, kv: KV, tokens: TokenBatch) -> None:
    (inner, slots, part), (qk_norm, eps, table) = added, rotation
    triton_rope_and_write(
        qkv, qk_norm, eps, tokens.positions, table, tokens.slots, kv.cache, kv.layer, inner[0], slots, part.up,
        early=arch(qkv.device).early,
    )  # fmt: skip


def _adapted_silu_mul(x: Tensor, added: Shrunk, linear: Linear) -> Tensor:
    inner, slots, part = added
    gate_up = _bare_linear(x, added, linear)
    found: Tensor = triton_silu_mul(gate_up, inner[0], slots, part.up, early=arch(x.device).early)
    return found


def _adapted_add(x: Tensor, y: Tensor, linear: Linear, slots: Tensor, part: AdapterPart) -> Shrunk:
    return Shrunk(triton_linear_add_beside(x, y, *weights(linear), slots, part.down), slots, part)


MANY_ADAPTED = AdaptedRows(norm_with_adapters, _bare_linear, _rotate, _adapted_silu_mul, _adapted_add)
MANY_ROWS = FusedRows(MOST_MANY_ROWS, _serves, _first, _linear, _silu_mul, _add, _decode, MANY_ADAPTED)
