"""SiLU times gate in Triton."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.adapt_fused_triton import first_of, inner_strides, with_lines
from gapless.kernels.library_triton import operator

ACTIVATION_BLOCK = 512
"""Columns a program: small, so that one row alone still spreads over several multiprocessors."""


@triton.jit
def silu_mul_kernel(
    gate_up, out, inner, adapters, lines, WIDTH: tl.constexpr, ROW: tl.constexpr, RANK: tl.constexpr,
    INNER_ROW: tl.constexpr, INNER_SLOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if RANK > 0:
        slot = tl.load(adapters + row)
        own = inside & (tl.zeros([BLOCK], tl.int64) + slot > 0)
        line = lines + slot * (RANK * 2 * WIDTH) + column
        gates, ups = first_of(line, own, 2 * WIDTH), first_of(line + WIDTH, own, 2 * WIDTH)
    left = gate_up + row * ROW + column
    gate = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(left + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:  # noqa: SIM102 (one is known when it is compiled)
        if slot > 0:
            sums = inner + row * INNER_ROW + slot * INNER_SLOT
            gate = with_lines(gate, gates, line, own, sums, 2 * WIDTH, RANK)
            up = with_lines(up, ups, line + WIDTH, own, sums + RANK, 2 * WIDTH, RANK)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(
    gate_up: Tensor, inner: Tensor | None = None, adapters: Tensor | None = None, lines: Tensor | None = None
) -> Tensor:
    """Return silu(left half) * right half of `gate_up` [T, 2I], whose rows may be apart: [T, I], computed in float32.

    With `adapters` int64 [T], first adds the adapters' second half: inner [T, slots, 2 * rank] times `lines` [slots,
    rank, 2I] of each token's slot.
    """
    assert gate_up.stride(1) == 1
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    rank = 0 if lines is None else lines.shape[1]
    silu_mul_kernel[(rows, triton.cdiv(width, ACTIVATION_BLOCK))](
        gate_up, out, inner, adapters, lines, width, gate_up.stride(0), rank, *inner_strides(inner),
        ACTIVATION_BLOCK, num_warps=4 if rank else 2,
    )  # fmt: skip
    return out


triton_silu_mul = operator(silu_mul)
