"""The operations as C++ for the CPU: operators of torch, which a recorded step replays without the interpreter.

float32 and bfloat16. They take any shapes that the seam allows; multiples of 16 are fast.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gapless.device import build
from gapless.kernels import linear as torch_linear
from gapless.kernels.seam import DecodeBatch, Kernels, Linear

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
NAME = "kernels"
DTYPES = (torch.float32, torch.bfloat16)


def load() -> Kernels | None:
    """Build and load them. None where that cannot be: then `build.outcomes[NAME].reason` says why."""
    return kernels() if build.operators(NAME, SOURCES).library else None


def kernels() -> Kernels:
    """The loaded operators. Model and step call them directly."""
    ops = torch.ops.gapless
    return Kernels(
        "native",
        linear,
        ops.rms_norm.default,
        ops.add_rms_norm.default,
        ops.rope_and_write.default,
        ops.silu_mul.default,
        ops.decode_attention.default,
        ops.prefill_attention.default,
        ops.sample.default,
        begin_decode,
        ops.finish.default,
    )


def begin_decode(
    words: Tensor, count: int, writes: int, state: Tensor, history: Tensor, pages: Tensor, page_size: int
) -> DecodeBatch:
    return DecodeBatch(*torch.ops.gapless.begin_decode.default(words, count, writes, state, history, pages, page_size))


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Ours where the processor multiplies bfloat16; oneDNN's for the rest."""
    if weight.dtype == torch.bfloat16 and torch.ops.gapless.has_bf16_dot():
        return NativeLinear(weight, bias)
    return torch_linear.Linear(weight, bias)


class NativeLinear:
    """x [T, in] -> x @ weight.T + bias [T, out] in bfloat16, over the one packed copy of the weight.

    Each output is one chain of float32 sums over ascending inputs, so it does not depend on the other rows of x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight: Tensor = torch.ops.gapless.linear_pack.default(weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.gapless.linear_packed.default(x, self.weight, self.outputs, self.bias)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` int64 [T] in plain order, [T, in]: a tied embedding needs no copy of its own."""
        out: Tensor = torch.ops.gapless.embedding_packed.default(ids, self.weight, self.outputs, self.inputs)
        return out
