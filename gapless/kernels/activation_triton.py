"""The function between the products of an MLP, with its gate, in Triton."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.adapt_fused_triton import first_of, inner_strides, with_lines
from gapless.kernels.kinds import Activation
from gapless.kernels.library_triton import operator

ACTIVATION_BLOCK = 512
"""Columns a program: small, so that one row alone still spreads over several multiprocessors."""


_SILU, _GELU, _GELU_TANH, _RELU = (
    tl.constexpr(int(kind)) for kind in (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.RELU)
)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """The `Activation` of float32 numbers. NaN stays."""
    if KIND == _SILU:
        found = x * tl.sigmoid(x)
    elif KIND == _GELU:
        found = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == _GELU_TANH:
        found = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        found = tl.where(x < 0, 0.0, x)
        if KIND != _RELU:
            found = found * found
    return found


@triton.jit
def activate_kernel(
    x, out, inner, adapters, lines, WIDTH: tl.constexpr, ROW: tl.constexpr, RANK: tl.constexpr,
    INNER_ROW: tl.constexpr, INNER_SLOT: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
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
    left = x + row * ROW + column
    gate = tl.load(left, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(left + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if RANK > 0:  # noqa: SIM102 (one is known when it is compiled)
        if slot > 0:
            sums = inner + row * INNER_ROW + slot * INNER_SLOT
            gate = with_lines(gate, gates, line, own, sums, 2 * WIDTH, RANK)
            up = with_lines(up, ups, line + WIDTH, own, sums + RANK, 2 * WIDTH, RANK)
    value = activated(gate, KIND)
    if GATED:
        value *= up
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def activate(
    x: Tensor, kind: int, gated: bool, inner: Tensor | None = None, adapters: Tensor | None = None,
    lines: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `seam.Kernels.activate`. Rows of x may be apart.

    With `adapters` int64 [T], first adds the adapters' second half to gated x [T, 2I]: inner [T, slots, 2 * rank] times
    `lines` [slots, rank, 2I] of each token's slot.
    """
    assert x.stride(1) == 1 and (gated or lines is None)
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = x.new_empty(rows, width)
    rank = 0 if lines is None else lines.shape[1]
    activate_kernel[(rows, triton.cdiv(width, ACTIVATION_BLOCK))](
        x, out, inner, adapters, lines, width, x.stride(0), rank, *inner_strides(inner), kind, gated,
        ACTIVATION_BLOCK, num_warps=4 if rank else 2,
    )  # fmt: skip
    return out


triton_activate = operator(activate)
