"""The kernels for CUDA: Triton's as operators of torch, and torch's own product."""

from __future__ import annotations

from gapless.kernels import unpack
from gapless.kernels.activation_triton import triton_activate
from gapless.kernels.adapt_triton import adapt
from gapless.kernels.adjust_triton import adjust
from gapless.kernels.ahead_triton import ahead
from gapless.kernels.attention_triton import triton_decode_attention, triton_prefill_attention
from gapless.kernels.begin_triton import begin_decode
from gapless.kernels.cut_triton import cut
from gapless.kernels.drafts_triton import accept, look_up
from gapless.kernels.few_rows import FEW_ADAPTED_ROWS, FEW_ROWS, FewRowsLinear
from gapless.kernels.finish_triton import finish
from gapless.kernels.invariant_attention_triton import triton_invariant_decode, triton_invariant_prefill
from gapless.kernels.invariant_linear_triton import InvariantLinear
from gapless.kernels.joined_rows import JOINED_ROWS
from gapless.kernels.kinds import WeightKind
from gapless.kernels.linear import TorchLinear
from gapless.kernels.masks_triton import mask, reply
from gapless.kernels.mixed_triton import begin_mixed
from gapless.kernels.norm_triton import triton_add_rms_norm, triton_layer_norm, triton_rms_norm
from gapless.kernels.pages_triton import triton_copy_pages
from gapless.kernels.quantised_linear import CODED_PRODUCTS, CODED_ROWS
from gapless.kernels.rope_triton import triton_angles, triton_rope_and_write
from gapless.kernels.sampling_triton import sample
from gapless.kernels.score_triton import score
from gapless.kernels.seam import Kernels
from gapless.kernels.stream import STREAM_ROWS
from gapless.kernels.suffixes_triton import recall, remember

TRITON_KERNELS = Kernels(
    name="triton",
    products={WeightKind.DENSE: TorchLinear},
    rms_norm=triton_rms_norm,
    layer_norm=triton_layer_norm,
    add_rms_norm=triton_add_rms_norm,
    angles=triton_angles,
    rope_and_write=unpack.rope_and_write(triton_rope_and_write),
    activate=triton_activate,
    decode_attention=unpack.decode_attention(triton_decode_attention),
    prefill_attention=unpack.prefill_attention(triton_prefill_attention),
    cut=cut,
    sample=sample,
    begin_decode=begin_decode,
    finish=finish,
    score=score,
    accept=accept,
    look_up=look_up,
    begin_mixed=begin_mixed,
    adjust=adjust,
    mask=mask,
    reply=reply,
    adapt=adapt,
    remember=remember,
    recall=recall,
    copy_pages=triton_copy_pages,
    stores_on_host=True,
    ahead=ahead,
)
HALF_KERNELS = TRITON_KERNELS._replace(
    products={WeightKind.DENSE: FewRowsLinear, **CODED_PRODUCTS},
    ways=(FEW_ROWS, STREAM_ROWS, FEW_ADAPTED_ROWS, JOINED_ROWS, CODED_ROWS),
)
"""The kernels for models of 16-bit numbers"""
INVARIANT_KERNELS = TRITON_KERNELS._replace(
    products={WeightKind.DENSE: InvariantLinear},
    decode_attention=unpack.decode_attention(triton_invariant_decode),
    prefill_attention=unpack.prefill_attention(triton_invariant_prefill),
)
"""The kernels under `--batch-invariant`: a row's bits depend on the row alone, not on its batch.

Norms, rotation, activation and sampling are the default ones: each of their programs works on one row in one way, and
comparing is exact. Product and attention are replaced, and a batch of few rows runs as any other.
"""
