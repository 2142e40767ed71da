"""The kernels for CUDA under `--batch-invariant`: a row's bits follow from the row, whatever else is in its batch.

Norms, rotation, activation and sampling are the default ones: each program of theirs works on one row in one way, and
comparing is exact. Product and attention are replaced, and a batch of few rows runs as any other.
"""

from __future__ import annotations

from gapless.kernels import unpack
from gapless.kernels.all_triton import KERNELS
from gapless.kernels.invariant_attention_triton import triton_invariant_decode, triton_invariant_prefill
from gapless.kernels.invariant_linear_triton import InvariantLinear

INVARIANT_KERNELS = KERNELS._replace(
    linear=InvariantLinear,
    decode_attention=unpack.decode_attention(triton_invariant_decode),
    prefill_attention=unpack.prefill_attention(triton_invariant_prefill),
    few_rows=None,
)
