"""A decoder layer for rows with adapters on CUDA: the seam's `JoinedRows`.

A product computes the first half of every slot's adapter for every row, even of a slot being loaded: a slot's result is
read for its own rows alone, and it has none until its load has been observed. First halves have the product's dtype
here, as in peft.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear as product_of

from gapless.kernels.activation_triton import triton_silu_mul
from gapless.kernels.adapt import AdapterPart, Joint
from gapless.kernels.attention_triton import triton_decode_attention
from gapless.kernels.linear import weights
from gapless.kernels.norm_triton import triton_add_rms_norm
from gapless.kernels.rope_triton import triton_rope_and_write
from gapless.kernels.seam import JoinedRows, Linear
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch

MOST_JOINED_ROWS = 256
"""Most rows that each read their own adapter; for more, kernels with shared reads are faster."""


def _whole(front: Tensor, size: int) -> Tensor:
    """Return `front` extended to the lines or numbers after it in memory, `size` in all."""
    return front.as_strided((size, *front.shape[1:]), front.stride())


def _linear(x: Tensor, linear: Linear, slots: Tensor, part: AdapterPart) -> Joint:
    weight, bias, (count, lines, _) = *weights(linear), part.down.shape
    assert part.down.data_ptr() == weight.data_ptr() + weight.nbytes, "they are in one memory"
    size = len(weight) + count * lines
    y = product_of(x, _whole(weight, size), None if bias is None else _whole(bias, size))
    return Joint(y[:, : len(weight)], y[:, len(weight) :].view(-1, count, lines), slots, part)


def _decode(joint: Joint, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float) -> Tensor:
    (product, inner, slots, part), (qk_norm, eps, table) = joint, rotation
    qkv = product.view(len(product), -1, kv.cache.shape[5])
    triton_rope_and_write(
        qkv, qk_norm, eps, tokens.positions, table, tokens.slots, kv.cache, kv.layer, inner, slots, part.up
    )
    found: Tensor = triton_decode_attention(qkv[:, : -2 * kv.cache.shape[4]], *kv, batch.rows, batch.kv_lens, scale)
    return found


def _silu_mul(joint: Joint) -> Tensor:
    gate_up, inner, slots, part = joint
    found: Tensor = triton_silu_mul(gate_up, inner, slots, part.up)
    return found


def _add_rms_norm(x: Tensor, joint: Joint, norm: Tensor, eps: float) -> Tensor:
    delta, inner, slots, part = joint
    found: Tensor = triton_add_rms_norm(x, delta, norm, eps, inner, slots, part.up)
    return found


JOINED_ROWS = JoinedRows(MOST_JOINED_ROWS, _linear, _decode, _silu_mul, _add_rms_norm)
