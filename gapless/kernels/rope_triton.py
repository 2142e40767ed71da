"""Query-key norm, rotary embedding and the write of keys and values into the KV cache, in one Triton launch; and the
angles of a step's tokens, in another."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.adapt_fused_triton import first_of, inner_strides, with_lines
from gapless.kernels.kv_triton import store_keys, store_nibbles
from gapless.kernels.library_triton import operator

HEADS = 4
"""Heads a program: few, so that one token alone still spreads over several multiprocessors."""


@triton.jit(do_not_specialize_on_alignment=["positions"])
def angles_kernel(positions, table, out, WIDTH: tl.constexpr, MAX_LEN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    # An inert row's position means nothing and may be past the end.
    line = table + tl.minimum(tl.load(positions + token), MAX_LEN - 1) * WIDTH
    tl.store(out + token * WIDTH + column, tl.load(line + column, mask=column < WIDTH), mask=column < WIDTH)


def angles(positions: Tensor, table: Tensor) -> Tensor:
    """See `seam.Kernels.angles`."""
    assert table.is_contiguous() and positions.is_contiguous()
    (length, width), tokens = table.shape, len(positions)
    out = table.new_empty(tokens, width)
    angles_kernel[(tokens,)](positions, table, out, width, length, triton.next_power_of_2(width), num_warps=1)
    return out


@triton.jit
def angle_of(angles, row, D: tl.constexpr, D_PAD: tl.constexpr, ANGLES_ROW: tl.constexpr):
    """Return cosines and sines of a row [1, D_PAD], the same for both halves of a head."""
    column = tl.arange(0, D_PAD)[None, :]
    line = angles + row.to(tl.int64) * ANGLES_ROW + tl.where(column < D // 2, column, column - D // 2)
    return tl.load(line, mask=column < D, other=0.0), tl.load(line + D // 2, mask=column < D, other=0.0)


@triton.jit
def turned(
    line, head, qk_norm, cos, sin, eps, inside, D: tl.constexpr, D_PAD: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Heads `head` [H, 1] of a token's queries and keys at `line`, normed and rotated: float32 [H, D_PAD]."""
    HALF: tl.constexpr = D // 2
    column = tl.arange(0, D_PAD)[None, :]
    left = column < HALF
    other = tl.where(left, column + HALF, column - HALF)
    here = tl.load(line + head * D + column, mask=inside, other=0.0).to(tl.float32)
    there = tl.load(line + head * D + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(here * here, axis=1) / D + eps)[:, None]
        here *= scale * tl.load(qk_norm + head * D + column, mask=inside, other=0.0).to(tl.float32)
        there *= scale * tl.load(qk_norm + head * D + other, mask=inside, other=0.0).to(tl.float32)
    return here * cos + tl.where(left, -there, there) * sin


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])
def rope_and_write_kernel(
    qkv, qk_norm, eps, angles, slots, cache, layer, scales, inner, adapters, up, RANK: tl.constexpr,
    INNER_ROW: tl.constexpr, INNER_SLOT: tl.constexpr, ROW: tl.constexpr, ANGLES_ROW: tl.constexpr,
    LAYERS: tl.constexpr, PAGE: tl.constexpr, TURNED: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, HEADS heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    turned = head < TURNED
    inside = (head < TURNED + KV_HEADS) & (column < HALF)
    if RANK > 0:
        adapter = tl.load(adapters + token)
        own = inside & (head * 0 + adapter > 0)
        WIDTH: tl.constexpr = (TURNED + KV_HEADS) * 2 * HALF
        line = up + adapter * (RANK * WIDTH) + head * (2 * HALF) + column
        lefts, rights = first_of(line, own, WIDTH), first_of(line + HALF, own, WIDTH)
    place = qkv + token * ROW + head * (2 * HALF) + column
    left = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:  # noqa: SIM102 (one is known when it is compiled)
        if adapter > 0:
            projection = (head >= TURNED - KV_HEADS).to(tl.int32) + (head >= TURNED).to(tl.int32)
            sums = inner + token * INNER_ROW + adapter * INNER_SLOT + projection * RANK
            left = with_lines(left, lefts, line, own, sums, WIDTH, RANK)
            right = with_lines(right, rights, line + HALF, own, sums, WIDTH, RANK)

    # Values pass through: their scale and cosine are one, their sine is zero.
    new_left, new_right = left, right
    if NORM:
        scale = tl.rsqrt(tl.sum(left * left + right * right, axis=1) / (2 * HALF) + eps)[:, None]
        weight = qk_norm + head * (2 * HALF) + column
        new_left *= tl.where(turned, scale * tl.load(weight, mask=inside & turned, other=0.0).to(tl.float32), 1.0)
        new_right *= tl.where(
            turned, scale * tl.load(weight + HALF, mask=inside & turned, other=0.0).to(tl.float32), 1.0
        )
    angle = angles + token * ANGLES_ROW + column
    cos = tl.where(turned, tl.load(angle, mask=column < HALF, other=0.0), 1.0)
    sin = tl.where(turned, tl.load(angle + HALF, mask=column < HALF, other=0.0), 0.0)
    out_left = (new_left * cos - new_right * sin).to(qkv.dtype.element_ty)
    out_right = (new_right * cos + new_left * sin).to(qkv.dtype.element_ty)
    tl.store(place, out_left, mask=inside & turned)
    tl.store(place + HALF, out_right, mask=inside & turned)

    slot = tl.load(slots + token)
    # Keys are the last rotated heads; values follow them.
    kv = head - (TURNED - KV_HEADS)
    value = kv // KV_HEADS
    if cache.dtype.element_ty == tl.uint8:
        first = cache + (slot // PAGE * LAYERS + layer) * (PAGE * KV_HEADS * (3 * HALF + 4))
        own = slot % PAGE * KV_HEADS + kv % KV_HEADS
        keys, nibbles = first + own * (2 * HALF) + column, first + PAGE * KV_HEADS * (2 * HALF) + own * HALF + column
        pairs = (first + PAGE * KV_HEADS * (3 * HALF) + own * 4).to(tl.pointer_type(tl.float16), bitcast=True)
        scale = None if scales is None else tl.load(scales + layer * 2)  # no function returns None in Triton 3.6
        store_keys(keys, out_left, scale, inside & (value == 0) & (kv >= 0))
        store_keys(keys + HALF, out_right, scale, inside & (value == 0) & (kv >= 0))
        store_nibbles(nibbles, pairs, out_left, out_right, inside & (value == 1))
    else:
        line = (((slot // PAGE) * LAYERS + layer) * 2 + value) * PAGE + slot % PAGE
        target = cache + (line * KV_HEADS + kv % KV_HEADS) * (2 * HALF) + column
        scale = None if scales is None else tl.load(scales + layer * 2 + tl.minimum(tl.maximum(value, 0), 1))
        store_keys(target, out_left, scale, inside & (kv >= 0))
        store_keys(target + HALF, out_right, scale, inside & (kv >= 0))


def rope_and_write(
    qkv: Tensor, qk_norm: Tensor | None, eps: float, angles: Tensor, slots: Tensor, cache: Tensor, layer: int,
    scales: Tensor | None = None, inner: Tensor | None = None, adapters: Tensor | None = None, up: Tensor | None = None,
) -> None:  # fmt: skip
    """Norm (if `qk_norm` [Hq + Hkv, D] is given) and rotate queries and keys of `qkv` [T, Hq + 2 * Hkv, D] in place,
    and write keys and values into `cache`, see `KV`, at `slots` int64 [T]. Tokens of qkv may
    be apart.

    `angles`: see `Rotation`. Of tokens with the same slot (inert ones, in the null page) any one is kept. Computed in
    float32.

    With `adapters` int64 [T], first adds the adapters' second half: inner [T, slots, 3 * rank] times `up` [slots,
    rank, all columns of qkv] of each token's slot. Values then go to the cache alone.
    """
    assert qkv.stride()[1:] == (qkv.shape[2], 1) and cache.is_contiguous() and angles.stride(1) == 1
    tokens, heads, width = qkv.shape
    _, layers, _, page_size, kv_heads, _ = cache.shape
    half, rank = width // 2, 0 if up is None else up.shape[1]
    grid = (tokens, triton.cdiv(heads, HEADS))
    rope_and_write_kernel[grid](
        qkv, qkv if qk_norm is None else qk_norm, eps, angles, slots, cache, layer, scales, inner, adapters, up, rank,
        *inner_strides(inner), qkv.stride(0), angles.stride(0), layers, page_size, heads - kv_heads, kv_heads, half,
        qk_norm is not None, HEADS, triton.next_power_of_2(half), num_warps=2 if rank else 1,
    )  # fmt: skip


triton_angles = operator(angles)
triton_rope_and_write = operator(rope_and_write, "qkv", "cache")
