"""Fused decoder layers in plain torch: the references of those in kernels/, for any device and dtype.

They gain nothing over separate operations, so the package has none of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels.adapt import AdapterPart, Joint, Shrunk
from gapless.kernels.attention import decode_attention
from gapless.kernels.plain import add_rms_norm, rms_norm, rope_and_write, silu_mul
from gapless.kernels.seam import AdaptedRows, FusedRows, JoinedRows, Linear
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch


def shrink(x: Tensor, slots: Tensor, part: AdapterPart) -> Shrunk:
    """Do the first half of `Kernels.adapt`, rows after each other."""
    inner = torch.bmm(part.down.index_select(0, slots).float(), x.float()[:, :, None])[:, :, 0]
    return Shrunk(inner[None], slots, part)


def expand(y: Tensor, shrunk: Shrunk) -> None:
    """Do the second half of `Kernels.adapt`: y [rows, out] gets what the adapters add."""
    inner, slots, part = shrunk
    up, begin = part.up.index_select(0, slots).float(), 0
    for lines, end in zip(torch.split(inner.sum(0), part.rank, dim=1), part.ends, strict=True):
        y[:, begin:end] += torch.bmm(lines[:, None], up[:, :, begin:end])[:, 0].where((slots > 0)[:, None], 0.0)
        begin = end


def own_half(joint: Joint) -> Shrunk:
    """Return the first half of each row's own adapter."""
    rows = torch.arange(len(joint.slots), device=joint.slots.device)
    return Shrunk(joint.inner[rows, joint.slots].float()[None], joint.slots, joint.part)


def normed_linear(x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
    return linear(rms_norm(x, norm, eps))


def normed_silu_mul(x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
    return silu_mul(linear(rms_norm(x, norm, eps)))


def linear_add(x: Tensor, y: Tensor, linear: Linear) -> None:
    x.add_(linear(y))


def decode(qkv: Tensor, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float) -> Tensor:
    rope_and_write(qkv, rotation, kv, tokens)
    return decode_attention(qkv[:, : -2 * kv.cache.shape[4]], kv, batch, scale)


def adapted_norm(
    x: Tensor, added: Shrunk | None, norm: Tensor, eps: float, slots: Tensor, part: AdapterPart | None
) -> tuple[Tensor, Tensor, Shrunk | None]:
    if added is not None:
        wide = x.to(torch.float32, copy=True)
        expand(wide, added)
        x = wide.to(x.dtype)
    y = rms_norm(x, norm, eps)
    return x, y, None if part is None else shrink(y, slots, part)


def adapted_linear(x: Tensor, added: Shrunk, linear: Linear) -> Tensor:
    y = linear(x)
    expand(y, added)
    return y


def adapted_silu_mul(x: Tensor, added: Shrunk, linear: Linear) -> Tensor:
    return silu_mul(adapted_linear(x, added, linear))


def adapted_linear_add(x: Tensor, y: Tensor, linear: Linear, slots: Tensor, part: AdapterPart) -> Shrunk:
    x.add_(linear(y))
    return shrink(y, slots, part)


def joint_linear(x: Tensor, linear: Linear, slots: Tensor, part: AdapterPart) -> Joint:
    inner = torch.einsum("bk,slk->bsl", x.float(), part.down.float())
    return Joint(linear(x), inner, slots, part)


def joint_sum(joint: Joint) -> Tensor:
    """The product with what adapters add to it, in its dtype."""
    y = joint.product.contiguous()
    expand(y, own_half(joint))
    return y


def joint_decode(joint: Joint, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float) -> Tensor:
    return decode(joint_sum(joint).view(len(joint.slots), -1, kv.cache.shape[5]), rotation, kv, tokens, batch, scale)


def joint_add_rms_norm(x: Tensor, joint: Joint, norm: Tensor, eps: float) -> Tensor:
    return add_rms_norm(x, joint_sum(joint), norm, eps)


ADAPTED_ROWS = AdaptedRows(adapted_norm, adapted_linear, adapted_silu_mul, adapted_linear_add)
FEW_ROWS = FusedRows(32, lambda linear: True, normed_linear, normed_silu_mul, linear_add, decode, ADAPTED_ROWS)
JOINED_ROWS = JoinedRows(
    256, joint_linear, joint_decode, lambda joint: silu_mul(joint_sum(joint)), joint_add_rms_norm,
)  # fmt: skip
