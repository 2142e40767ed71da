"""The operations as C++ for the CPU: operators of torch, which a recorded step replays without the interpreter.

float32, bfloat16 and float16. All shapes of the seam work; multiples of 16 are fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gapless.base import host
from gapless.device import build, compiling, facts
from gapless.kernels import pages, unpack
from gapless.kernels.kinds import BLOCK, WeightKind, WeightLayout
from gapless.kernels.matrix import Linear, Matrix, round_to
from gapless.kernels.native import choice
from gapless.kernels.native.choice import Way
from gapless.kernels.seam import DecodeBatch, Kernels, MixedBatch
from gapless.kernels.tables import Tables
from gapless.kernels.unpack import unpacked
from gapless.kernels.views import Counts

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
NAME = "kernels"
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OF_VIEWS = (
    "cut", "sample", "finish", "score", "accept", "look_up", "ask", "draft", "keep_drafts", "adjust", "mask", "reply",
    "adapt", "remember", "recall",
)  # fmt: skip
"""Operations with an operator of the same name that takes fields of views"""


def load() -> Kernels | None:
    """Build and load them. None if that fails, for the reason in `build.outcomes[NAME].reason`."""
    return kernels() if build.operators(NAME, SOURCES).library else None


def kernels() -> Kernels:
    """Return the loaded operators; ones of several tensors take views."""
    ops = torch.ops.gapless
    of_views: dict[str, Any] = {name: unpacked(getattr(ops, name).default) for name in OF_VIEWS}
    return Kernels(
        "native",
        PRODUCTS_BY_KIND,
        ops.rms_norm.default,
        ops.layer_norm.default,
        ops.add_rms_norm.default,
        ops.angles.default,
        unpack.rope_and_write(ops.rope_and_write.default),
        ops.activate.default,
        unpack.decode_attention(ops.decode_attention.default),
        unpack.prefill_attention(ops.prefill_attention.default),
        begin_decode=begin_decode,
        begin_mixed=begin_mixed,
        join=ops.join.default,
        copy_pages=copy_pages,
        **of_views,
    )


def begin_decode(words: Tensor, counts: Counts, tables: Tables, page_size: int) -> DecodeBatch:
    """See `seam.Kernels.begin_decode`."""
    state, _, history, pages, _ = tables
    sizes = counts.rows, counts.places, counts.page_writes
    return DecodeBatch(*torch.ops.gapless.begin_decode.default(words, *sizes, state, history, pages, page_size))


def begin_mixed(words: Tensor, counts: Counts, tables: Tables, page_size: int) -> MixedBatch:
    """See `seam.Kernels.begin_mixed`."""
    return MixedBatch(*torch.ops.gapless.begin_mixed.default(words, *counts, *tables[:4], page_size))


def copy_pages(src: Tensor, dst: Tensor, places: Tensor, sums: Tensor) -> None:
    if src.dtype == torch.int32:
        torch.ops.gapless.copy_pages.default(src, dst, places, sums)
    else:
        pages.copy_pages(src, dst, places, sums)


def share_from(times: int) -> None:
    """Set, for calls from this thread, the least work of a second thread, in times of the work that pays for it."""
    if NAME in build.outcomes and build.outcomes[NAME].library:
        torch.ops.gapless.share_from(times)


def invariant(kernels: Kernels) -> Kernels:
    """Return kernels whose rows do not depend on their batch: a query in a chunk gets the bits of decode attention."""
    prefill = unpack.prefill_attention(torch.ops.gapless.invariant_prefill_attention.default)
    return kernels._replace(prefill_attention=prefill)


def ways(dtype: torch.dtype) -> list[Way]:
    """Return the ways to multiply by a weight of this dtype here, the likely fastest first."""
    pairs = dtype == torch.bfloat16 and torch.ops.gapless.has_bf16_dot()
    amx = pairs and not torch.ops.gapless.amx_missing()
    return [Way.AMX, Way.BF16_DOT] if amx else [Way.BF16_DOT, Way.FLOATS] if pairs else [Way.FLOATS]


class Product(NamedTuple):
    """The product for weights of a dtype on this machine."""

    path: str
    """amx or bf16_dot; else the vector unit that computes in float32"""
    missing: str
    """Reason that a faster path of this processor is not used; empty if there is none."""


def product(dtype: torch.dtype = torch.bfloat16) -> Product:
    """Return the fastest usable product in this process. Builds the operators if need be."""
    if load() is None:
        return Product(f"torch, {facts.vector_unit()}", "the C++ kernels are not built")
    best = ways(dtype)[0]
    path = torch.ops.gapless.vector_unit() if best is Way.FLOATS else best.name.lower()
    return Product(path, _missing(best) if dtype == torch.bfloat16 else "")


def _missing(best: Way) -> str:
    has = host.processor_says("flags").split()
    if compiling.is_capped():
        return "ATEN_CPU_CAPABILITY=avx2 keeps AVX-512 from it"
    if best is Way.FLOATS and "avx512_bf16" in has:
        return "avx512_bf16: unknown to the compiler"
    return f"amx: {torch.ops.gapless.amx_missing()}" if best is not Way.AMX and "amx_bf16" in has else ""


def choices_file() -> Path:
    """Return the file of choices for one library on one kind of processor."""
    notes = build.outcomes[NAME].notes
    assert notes is not None
    return notes


def chosen() -> list[str]:
    """Describe the measured choices for the shapes of models loaded here, with their gains."""
    if load() is None or len(found := ways(torch.bfloat16)) == 1:
        return []
    first, second = (way.name.lower() for way in found)
    pair = f"{choice.pair_name(found)}: "
    return [
        f"{name.removeprefix(pair)}: {first if choice.serves_first(ratios) else second}"
        + (f", {first} takes {choice.typical(ratios):.2f} of the time of {second}" if ratios else ", not measured")
        for name, ratios in choice.read(choices_file()).items()
        if name.startswith(pair)
    ]


def draft_linear(matrix: Matrix) -> Linear:
    """Make a layer of a drafting head, which decides no token: it keeps at most one byte per weight."""
    return ByteLinear.of(matrix) or ByteLinear(matrix.multiplied_out())


class ByteLinear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out] over a weight in 8 or 4 bits, in float32, bfloat16 or float16.

    Each row of x is rounded to 127 steps either way of the largest of each 64 inputs, or of 32 if the weight's groups
    are no multiples of 64. Sums are of whole numbers: a row's bits depend neither on the others nor on the threads.
    """

    @classmethod
    def of(cls, matrix: Matrix) -> Self | None:
        """A dense weight is rounded to 8 bits. None for groups that are no multiples of 32."""
        layout = matrix.layout
        if layout.kind is WeightKind.FP8 or layout.group % BLOCK:
            return None
        return cls(matrix)

    def __init__(self, matrix: Matrix) -> None:
        self.kind, self.bias = matrix.layout.kind, matrix.bias
        self.group, self.outputs = matrix.layout.group, matrix.outputs
        if self.kind is WeightKind.DENSE:
            matrix = matrix._replace(tensors=round_to(WeightLayout(WeightKind.INT8), matrix.tensors[0]))
        weight, scale, *zeros = (tensor.contiguous() for tensor in matrix.tensors)
        zero = zeros[0] if zeros else None
        self.weight: Tensor = torch.ops.gapless.linear_pack_bytes.default(weight, scale, zero, self.group)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        how = self.weight, self.outputs, self.group, self.bias
        if out is None:
            found: Tensor = torch.ops.gapless.linear_bytes.default(x, *how)
            return found
        torch.ops.gapless.linear_bytes_to.default(x, *how, out)
        return out


class HalfFp8Linear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out] in bfloat16 over a weight in FP8, which is widened for AMX.

    The products of 128 inputs are added up, or of a group; float32 adds these in their order, for any number of rows.
    """

    kind = WeightKind.FP8

    @classmethod
    def of(cls, matrix: Matrix) -> Self | None:
        """None if AMX does not serve, or not this dtype, or for groups that are no multiples of 32."""
        fits = matrix.dtype == torch.bfloat16 and not matrix.layout.group % BLOCK
        return cls(matrix) if fits and not torch.ops.gapless.amx_missing() else None

    def __init__(self, matrix: Matrix) -> None:
        self.group, self.outputs, self.bias = matrix.layout.group, matrix.outputs, matrix.bias
        weight, scale = (tensor.contiguous() for tensor in matrix.tensors)
        self.weight: Tensor = torch.ops.gapless.linear_pack_fp8.default(weight, scale, self.group)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        how = self.weight, self.outputs, self.group, self.bias
        if out is None:
            found: Tensor = torch.ops.gapless.linear_fp8.default(x, *how)
            return found
        torch.ops.gapless.linear_fp8_to.default(x, *how, out)
        return out


class NativeLinear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out], over the one packed copy of the weight, in float32, bfloat16
    or float16. x and bias have the weight's dtype; of a weight in bfloat16 they may have any.

    The processor and the weight's shape fix the order of an output's float32 sums: it does not depend on the other
    rows of x.
    """

    kind = WeightKind.DENSE

    @classmethod
    def of(cls, matrix: Matrix) -> Self:
        return cls(matrix.tensors[0], matrix.bias)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight: Tensor = torch.ops.gapless.linear_pack.default(weight.contiguous())
        self.bias = bias
        self.way = choice.fastest(ways(weight.dtype), self.weight, self.outputs, self.inputs, choices_file())

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        ops, way = torch.ops.gapless, self.way if x.dtype == self.weight.dtype else Way.FLOATS
        if out is None:
            found: Tensor = ops.linear.default(x, self.weight, self.outputs, self.bias, way)
            return found
        ops.linear_to.default(x, self.weight, self.outputs, self.bias, way, out)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows `ids` int64 [T] in plain order, [T, in]: a tied embedding needs no other copy."""
        out: Tensor = torch.ops.gapless.embedding_packed.default(ids, self.weight, self.outputs, self.inputs)
        return out


PRODUCTS_BY_KIND: dict[WeightKind, type[Linear]] = {
    WeightKind.DENSE: NativeLinear,
    WeightKind.FP8: HalfFp8Linear,
    WeightKind.INT8: ByteLinear,
    WeightKind.INT4: ByteLinear,
}
