"""RMSNorm, alone and with the residual's addition before it, and LayerNorm, in Triton. One program a row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.adapt_fused_triton import first_of, inner_strides, with_lines
from gapless.kernels.library_triton import launch_options, operator


@triton.jit
def rms_norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    inside = column < WIDTH
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    normed = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x, delta, weight, out, eps, inner, adapters, lines, WIDTH: tl.constexpr, ROW: tl.constexpr, RANK: tl.constexpr,
    INNER_ROW: tl.constexpr, INNER_SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = row * WIDTH + column
    inside = column < WIDTH
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(delta + row * ROW + column, mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:
        slot = tl.load(adapters + row)
        if slot > 0:
            line, sums = lines + slot * (RANK * WIDTH) + column, inner + row * INNER_ROW + slot * INNER_SLOT
            value = with_lines(value, first_of(line, inside, WIDTH), line, inside, sums, WIDTH, RANK)
    # The norm uses the sum rounded to x's dtype, as the next layer reads it.
    kept = value.to(x.dtype.element_ty)
    tl.store(x + at, kept, mask=inside)
    value = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    normed = value * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_kernel(
    x, weight, bias, out, eps, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    inside = column < WIDTH
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # An exact mean: the difference from it may be all that a row has.
    value = tl.where(inside, value - tl.math.div_rn(tl.sum(value, axis=0), WIDTH * 1.0), 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    if WEIGHTED:
        value *= tl.load(weight + column, mask=inside, other=0.0)
    if BIASED:
        value += tl.load(bias + column, mask=inside, other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    """Return the warps for eight values a thread: one 16-byte load of a 16-bit dtype."""
    return min(16, max(1, block // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, early: bool = False) -> Tensor:
    """Return `x` [T, H] over its root mean square, times `weight` [H]; computed in float32.

    early: see `launch_options`.
    """
    assert x.is_contiguous() and weight.is_contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](x, weight, out, eps, width, early, block, num_warps=_warps(block), **launch_options(early))
    return out


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, inner: Tensor | None = None, adapters: Tensor | None = None,
    lines: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add `delta` [T, H], whose rows may be apart, to `x` [T, H], rounded to its dtype; return the sum's `rms_norm`.

    With `adapters` int64 [T], also adds the adapters' second half: inner [T, slots, rank] times `lines` [slots, rank,
    H] of each token's slot.
    """
    assert x.is_contiguous() and delta.stride(1) == 1 and weight.is_contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    add_rms_norm_kernel[(rows,)](
        x, delta, weight, out, eps, inner, adapters, lines, width, delta.stride(0),
        0 if lines is None else lines.shape[1], *inner_strides(inner), block, num_warps=_warps(block),
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `x` [T, H] less its mean, over its standard deviation, times `weight` [H], plus `bias` [H], both float32;
    computed in float32."""
    assert x.is_contiguous() and all(part is None or part.is_contiguous() for part in (weight, bias))
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    layer_norm_kernel[(rows,)](
        x, x if weight is None else weight, x if bias is None else bias, out, eps, width, weight is not None,
        bias is not None, block, num_warps=_warps(block),
    )  # fmt: skip
    return out


triton_layer_norm = operator(layer_norm)
triton_rms_norm = operator(rms_norm)
triton_add_rms_norm = operator(add_rms_norm, "x")
