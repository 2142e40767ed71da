"""Numbers of several bits in the words of a checkpoint, and weights made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels.kinds import WeightKind, WeightLayout
from gapless.kernels.matrix import packed

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 3 low bits of a 4-bit float (E2M1)"""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of 4 or 8 `bits` of words int32 [R, C], the lowest bits first: uint8 [R, C * 32 / bits]."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=2).view(len(words), -1)


def rows_of(blocks: Tensor, outputs: int, rows: int = 0) -> Tensor:
    """Return scales by blocks of `rows` outputs, [ceil(N / rows), G] or of all outputs, as float32 [N, G]."""
    if blocks.numel() == 1:
        return blocks.float().reshape(1, 1).expand(outputs, 1).contiguous()
    wide = blocks.float()
    return wide.repeat_interleave(rows, dim=0)[:outputs] if rows else wide


def by_column(found: Tensor, groups: Tensor) -> Tensor:
    """Return numbers by group [N, G] as float32 ones by column [N, K]; `groups` int64 [K] are the groups of these."""
    return found.float()[:, groups]


def weight_of(layout: WeightLayout, numbers: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of the weight (numbers - zero) * scale.

    numbers: uint8 [N, K]; scale [N, G]; zero of any whole dtype [N, G], 128 all over if the layout is INT8; groups:
    int64 [K], in order unless the layout is dense.
    """
    if layout.kind is WeightKind.INT4:
        return packed(numbers), scale.float(), zero.to(torch.uint8)
    if layout.kind is WeightKind.INT8:
        return (numbers.short() - 128).to(torch.int8), scale.float()
    return ((numbers.float() - by_column(zero, groups)) * by_column(scale, groups),)


def fp4_values(halves: Tensor, exponents: Tensor) -> Tensor:
    """Return 4-bit floats with a power of two for each 32: float32 [..., K].

    halves: uint8 [..., K / 2], the even numbers in low halves; exponents: uint8 [..., K / 32], biased by 127.
    """
    table = torch.tensor([*FP4, *(-x for x in FP4)])
    values = torch.stack((table[(halves & 15).long()], table[(halves >> 4).long()]), dim=-1)
    blocks = values.view(*exponents.shape, -1)
    return torch.ldexp(blocks, exponents.int()[..., None] - 127).flatten(-2)
