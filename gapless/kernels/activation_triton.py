"""SiLU times gate in Triton."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.library_triton import operator

BLOCK = 512
"""Columns a program: small, so that one row alone still spreads over several multiprocessors."""


@triton.jit
def silu_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    left = gate_up + row * 2 * WIDTH + column
    gate = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(left + WIDTH, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(left half) * right half of `gate_up` [T, 2I]: [T, I], computed in float32."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    silu_mul_kernel[(rows, triton.cdiv(width, BLOCK))](gate_up, out, width, BLOCK, num_warps=2)
    return out


triton_silu_mul = operator("triton_silu_mul(Tensor gate_up) -> Tensor", silu_mul)
