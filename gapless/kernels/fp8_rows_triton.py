"""Rows rounded to E4M3 in Triton, each with a scale of its own, after their norm or alone. One program a row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.library_triton import arch, launch_options, operator

LARGEST_CODE = tl.constexpr(448.0)


@triton.jit
def fp8_rows_kernel(
    x, norm, out, factor, eps, WIDTH: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr
):
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    inside = column < WIDTH
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
        value *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=0)
    scale = tl.where(largest > 0, largest / LARGEST_CODE, 1.0)
    # A row that is not finite stays so: its quotients are NaN.
    tl.store(out + at, (value / scale).to(tl.float8e4nv), mask=inside)
    tl.store(factor + tl.program_id(0), scale)


def fp8_rows(x: Tensor, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Round x [T, K], after its `rms_norm` if `norm` [K] is given, to E4M3 codes [T, K] times a factor float32 [T, 1],
    which makes a row's largest number 448."""
    assert x.is_contiguous()
    rows, width = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    factor = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block, early = triton.next_power_of_2(width), arch(x.device).early
    if rows:  # none if a chunk ends before its prompt
        fp8_rows_kernel[(rows,)](
            x, x if norm is None else norm, out, factor, eps, width, norm is not None, early, block,
            num_warps=min(16, max(1, block // 256)), **launch_options(early),
        )  # fmt: skip
    return out, factor


triton_fp8_rows = operator(fp8_rows)
