"""The formats of a KV memory in Triton: loads keys and values of entries, and writes a token's. Reference: kv.py.

The memory's dtype is its format, known when a kernel is compiled. A tile of values from nibbles has the order of their
bytes: column 2 j is number j of the head, and column 2 j + 1 number j + D / 2. See `value_columns`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from gapless.kernels.kv import LARGEST_E4M3, LARGEST_HALF, LEVELS
from gapless.kernels.splits_triton import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
_LARGEST = tl.constexpr(LARGEST_E4M3)
_LARGEST_HALF = tl.constexpr(LARGEST_HALF)
_LEVELS = tl.constexpr(LEVELS)
_TO_INTEGERS = tl.constexpr(12_582_912.0)
"""1.5 * 2 ** 23: numbers plus it are rounded to integers, ties to even."""
_UP = tl.constexpr(2.0**120)


@triton.jit
def computable(x):
    """Return x, in float32 if it is bfloat16 in Triton's interpreter, whose bfloat16 arithmetic is wrong."""
    return x.to(tl.float32) if _INTERPRETED and x.dtype == tl.bfloat16 else x


@triton.jit
def head_of(cache, layer, head, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Return the addresses of a layer's keys and values of a KV head in the first page, and of the pairs of nibbles'
    scale and least value."""
    if cache.dtype.element_ty == tl.uint8:
        first = cache + layer * (PAGE * HEADS * (D // 2 * 3 + 4))
        keys, values = first + head * D, first + PAGE * HEADS * D + head * (D // 2)
        pairs = first + PAGE * HEADS * (D // 2 * 3) + head * 4
    else:
        keys = cache + layer * (2 * PAGE * HEADS * D) + head * D
        values = keys + PAGE * HEADS * D
        pairs = values
    return keys, values, pairs


@triton.jit
def keys_of(keys, where, there, q, MASKED: tl.constexpr):
    """Load keys [D_PAD, N] for q [M, D_PAD] of entries at `where` [N]: 0 unless `there`."""
    offs_d = tl.arange(0, q.shape[1])
    keys = _as_bytes(keys)
    if MASKED:
        k = tl.load(keys + where[None, :] + offs_d[:, None], mask=tl.trans(there), other=0)
    else:
        k = tl.load(keys + where[None, :] + offs_d[:, None])
    return from_e4m3(k, q.dtype) if k.dtype == tl.uint8 else computable(k)


@triton.jit
def values_of(
    values, pairs, where, base, offset, there, q, ENTRY: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Load values [N, D_PAD] as `keys_of`, with the columns of `value_columns`. Nibbles are at `offset` [N] of pages at
    `base` [N]."""
    if values.dtype.element_ty == tl.uint8:
        HALF: tl.constexpr = D // 2
        place = values + (base + offset * (ENTRY // 2))[:, None] + tl.arange(0, q.shape[1] // 2)[None, :]
        words = (pairs + (base + offset * (ENTRY // D * 4))).to(tl.pointer_type(tl.uint32), bitcast=True)
        if MASKED:
            inside = tl.max(there.to(tl.int32), 1) > 0
            byte = tl.load(place, mask=inside[:, None] & (tl.arange(0, q.shape[1] // 2) < HALF)[None, :], other=0)
            word = tl.load(words, mask=inside, other=0)
        else:
            byte, word = tl.load(place), tl.load(words)
        scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
        least = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
        low, high = (byte & 15).to(tl.float32) * scale + least, (byte >> 4).to(tl.float32) * scale + least
        return tl.reshape(tl.join(low, high), [low.shape[0], q.shape[1]]).to(q.dtype)
    offs_d = tl.arange(0, q.shape[1])
    values = _as_bytes(values)
    if MASKED:
        v = tl.load(values + where[:, None] + offs_d[None, :], mask=there, other=0)
    else:
        v = tl.load(values + where[:, None] + offs_d[None, :])
    return from_e4m3(v, q.dtype) if v.dtype == tl.uint8 else computable(v)


@triton.jit
def value_columns(cache, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return the number in a head of each column of a tile of values [D_PAD]; at least D for columns of none."""
    column = tl.arange(0, D_PAD)
    if cache.dtype.element_ty == tl.uint8:
        column = tl.where(column < D, column // 2 + column % 2 * (D // 2), D)
    return column


@triton.jit
def key_scaled(factor, scales, layer):
    """Return the factor of scores of a layer's stored keys."""
    return factor if scales is None else factor * tl.load(scales + layer * 2)


@triton.jit
def value_scaled(acc, cache, scales, layer):
    """Return sums of a layer's stored values as sums of values."""
    if scales is not None and cache.dtype.element_ty != tl.uint8:
        acc *= tl.load(scales + layer * 2 + 1)
    return acc


@triton.jit
def _as_bytes(place):
    """Return the address of e4m3 as one of bytes."""
    return place.to(tl.pointer_type(tl.uint8), bitcast=True) if place.dtype.element_ty == tl.float8e4nv else place


@triton.jit
def from_e4m3(bytes, dtype: tl.constexpr):
    if not _INTERPRETED and is_cuda():
        return bytes.to(tl.float8e4nv, bitcast=True).to(dtype)
    # Sign, exponent and fraction at their places in a float32 that is 2^120 too small. The interpreter's conversion
    # reads NaN as 480, and AMD's e4m3 may be fnuz.
    wide = bytes.to(tl.int32)
    found = (((wide & 128) << 24) | ((wide & 127) << 20)).to(tl.float32, bitcast=True) * _UP
    return tl.where((wide & 127) == 127, float("nan"), found).to(dtype)


@triton.jit
def to_e4m3(x, scale):
    """Return float32 x / scale as e4m3: to nearest, ties to even, at most 448 in size. NaN stays."""
    x = tl.clamp(tl.div_rn(x, scale + tl.zeros_like(x)), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if _INTERPRETED or not is_cuda():  # the interpreter's conversion loses the carry of a rounding
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - 960
        small = (tl.abs(x) * 512 + _TO_INTEGERS).to(tl.int32, bitcast=True) & 15
        byte = tl.where(tl.abs(x) < 0.015625, small, normal) | (x.to(tl.int32, bitcast=True) >> 24) & 128
        return tl.where(x == x, byte, 127).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def store_keys(place, x, scale, mask):
    """Store keys x [.., D], divided by their scale unless it is None, at `place` of a memory."""
    if scale is None:
        tl.store(place, x.to(place.dtype.element_ty), mask=mask)
    else:
        tl.store(_as_bytes(place), to_e4m3(x.to(tl.float32), scale).to(tl.uint8, bitcast=True), mask=mask)


@triton.jit
def store_nibbles(bytes, pair, left, right, inside):
    """Store values of heads, `inside` their left and right halves [H, D / 2], as nibbles and pairs."""
    infinite: tl.constexpr = float("inf")
    left, right = left.to(tl.float32), right.to(tl.float32)
    lost = tl.sum(tl.where(inside, tl.where(left == left, 0, 1) + tl.where(right == right, 0, 1), 0), 1)[:, None] > 0
    least = tl.min(tl.where(inside, tl.minimum(left, right), infinite), 1)[:, None]
    most = tl.max(tl.where(inside, tl.maximum(left, right), -infinite), 1)[:, None]
    least = tl.where(lost, float("nan"), least)
    scale = _half(tl.div_rn(most - least, tl.full(least.shape, _LEVELS, tl.float32)))
    least = _half(least)
    some = tl.max(inside.to(tl.int32), 1)[:, None] > 0
    tl.store(pair, scale, mask=some)
    tl.store(pair + 1, least, mask=some)
    low, high = _steps(left, scale, least), _steps(right, scale, least)
    tl.store(bytes, (low | high << 4).to(tl.uint8), mask=inside)


@triton.jit
def _half(x):
    return tl.clamp(x, -_LARGEST_HALF, _LARGEST_HALF, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit
def _steps(x, scale, least):
    scale = tl.broadcast_to(scale.to(tl.float32), x.shape)
    steps = tl.div_rn(x - least.to(tl.float32), tl.where(scale > 0, scale, 1.0))
    steps = tl.where(scale > 0, tl.minimum(tl.maximum(steps, 0.0), _LEVELS), 0.0)
    return (steps + _TO_INTEGERS - _TO_INTEGERS).to(tl.int32)
