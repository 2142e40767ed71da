"""The operations as C++ for the CPU: operators of torch, which a recorded step replays without the interpreter.

float32 and bfloat16. They take any shapes that the seam allows; multiples of 16 are fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.base import host
from gapless.device import build
from gapless.kernels import linear as torch_linear
from gapless.kernels import pages, unpack
from gapless.kernels.native import choice
from gapless.kernels.seam import DecodeBatch, Kernels, Linear, MixedBatch
from gapless.kernels.tables import Tables
from gapless.kernels.unpack import unpacked
from gapless.kernels.views import Counts

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
NAME = "kernels"
DTYPES = (torch.float32, torch.bfloat16)
OF_VIEWS = (
    "cut", "sample", "finish", "score", "accept", "look_up", "ask", "draft", "keep_drafts", "adjust", "mask", "reply",
    "adapt", "remember", "recall",
)  # fmt: skip
"""Operations whose operators have the same names, and take fields of views"""


def load() -> Kernels | None:
    """Build and load them. None if that cannot be: `build.outcomes[NAME].reason` says why."""
    return kernels() if build.operators(NAME, SOURCES).library else None


def kernels() -> Kernels:
    """Return the loaded operators; those of several tensors take views."""
    ops = torch.ops.gapless
    of_views: dict[str, Any] = {name: unpacked(getattr(ops, name).default) for name in OF_VIEWS}
    return Kernels(
        "native",
        linear,
        ops.rms_norm.default,
        ops.add_rms_norm.default,
        unpack.rope_and_write(ops.rope_and_write.default),
        ops.silu_mul.default,
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


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Make the layer: ours if the processor multiplies bfloat16, else oneDNN's; both for a small float32 weight."""
    if weight.dtype == torch.bfloat16 and torch.ops.gapless.has_bf16_dot():
        return NativeLinear(weight, bias)
    if weight.dtype == torch.float32 and weight.numel() <= SMALL:
        return SmallLinear(weight, bias)
    return torch_linear.TorchLinear(weight, bias)


def invariant(kernels: Kernels) -> Kernels:
    """Return kernels whose rows do not depend on their batch: a query in a chunk gets the bits of decode attention."""
    prefill = unpack.prefill_attention(torch.ops.gapless.invariant_prefill_attention.default)
    return kernels._replace(linear=invariant_linear, prefill_attention=prefill)


class Product(NamedTuple):
    """The path that multiplies bfloat16 on this machine."""

    path: str
    """amx or avx512_bf16: ours; torch's with the vectors that it uses"""
    missing: str
    """Why a faster path that this processor has is not used; empty when it has none."""


def product() -> Product:
    """Return the fastest product that serves in this process. Builds the operators if need be."""
    torchs = f"torch, {torch.backends.cpu.get_cpu_capability().lower()}"
    has = host.processor_says("flags").split()
    if load() is None:
        return Product(torchs, "the C++ kernels are not built")
    if not torch.ops.gapless.has_bf16_dot():
        return Product(torchs, "avx512_bf16: unknown to the compiler" if "avx512_bf16" in has else "")
    missing = torch.ops.gapless.amx_missing()
    if not missing:
        return Product("amx", "")
    return Product("avx512_bf16", f"amx: {missing}" if "amx_bf16" in has else "")


def serves_amx(packed: Tensor, outputs: int, inputs: int) -> bool:
    """Return whether AMX serves this packed weight [outputs, inputs], for any number of rows."""
    return not torch.ops.gapless.amx_missing() and choice.serves_amx(packed, outputs, inputs, choices_file())


def choices_file() -> Path:
    """Return the file that keeps choices; its name is a hash of the sources, the compiler's flags and the processor."""
    library = build.outcomes[NAME].library
    assert library is not None
    return library.with_suffix(".json")


def chosen() -> list[str]:
    """Describe what measuring chose for the shapes of models that were loaded here, and by how much."""
    shapes = choice.read(choices_file()) if product().path == "amx" else {}
    return [
        f"{name}: {'amx' if choice.faster(ratios) else 'avx512_bf16'}"
        + (f", amx takes {choice.typical(ratios):.2f} of the vectors' time" if ratios else ", not measured")
        for name, ratios in shapes.items()
    ]


def invariant_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Make a layer of ours in every dtype: oneDNN promises nothing about the order of its sums."""
    ours = linear(weight, bias)
    return ours if isinstance(ours, NativeLinear) else WideLinear(weight, bias)


def draft_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Make a layer of a head, which decides about no token: it keeps one byte per weight, or two where the processor
    cannot multiply bytes."""
    layer = ByteLinear if torch.ops.gapless.has_byte_dot() else WideLinear
    return layer(weight.float() if layer is ByteLinear else weight.bfloat16(), bias)


FEW, SMALL = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8, 1 << 20
"""Rows up to which, and numbers of a float32 weight up to which, a call of oneDNN costs more than our product."""


class SmallLinear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out] in float32 with two copies of its weight.

    Few rows go through our product, more through oneDNN's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.few, self.many = WideLinear(weight, bias), torch_linear.TorchLinear(weight, bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return (self.few if x.shape[0] <= FEW else self.many)(x, out)


class WideLinear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out] in float32 or bfloat16, on any processor. The weight may be in
    bfloat16 where x is not.

    Each output is one chain of float32 sums over ascending inputs, so it does not depend on the other rows of x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs = weight.shape[0]
        self.weight: Tensor = torch.ops.gapless.linear_pack_wide.default(weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        found: Tensor = torch.ops.gapless.linear_wide.default(x, self.weight, self.outputs, self.bias)
        return found if out is None else out.copy_(found)


class ByteLinear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out] in float32 or bfloat16, of which both factors are rounded to
    whole numbers of 8 bits: the weight by outputs, each row of x by 64 inputs. A row does not depend on the others."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.bias = weight.shape[0], bias
        self.weight, self.scales = torch.ops.gapless.linear_pack_bytes.default(weight.contiguous())

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        found: Tensor = torch.ops.gapless.linear_bytes.default(x, self.weight, self.scales, self.outputs, self.bias)
        return found if out is None else out.copy_(found)


class NativeLinear:
    """A layer x [T, in] -> x @ weight.T + bias [T, out] in bfloat16, over the one packed copy of the weight.

    The processor and the weight's shape fix the order of an output's float32 sums: it does not depend on the other
    rows of x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight: Tensor = torch.ops.gapless.linear_pack.default(weight.contiguous())
        self.bias = bias
        self.amx = serves_amx(self.weight, self.outputs, self.inputs)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        ops = torch.ops.gapless
        if out is None:
            found: Tensor = ops.linear_packed.default(x, self.weight, self.outputs, self.bias, self.amx)
            return found
        ops.linear_packed_to.default(x, self.weight, self.outputs, self.bias, self.amx, out)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows `ids` int64 [T] in plain order, [T, in]: a tied embedding needs no other copy."""
        out: Tensor = torch.ops.gapless.embedding_packed.default(ids, self.weight, self.outputs, self.inputs)
        return out
