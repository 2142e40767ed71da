"""The operations as C++ for the CPU: operators of torch, which a recorded step replays without the interpreter.

float32 and bfloat16. They take any shapes that the seam allows; multiples of 16 are fast.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gapless.device import build
from gapless.kernels import linear as torch_linear
from gapless.kernels import unpack
from gapless.kernels.seam import DecodeBatch, Kernels, Linear, MixedBatch
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts, Filters

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
NAME = "kernels"
DTYPES = (torch.float32, torch.bfloat16)


def load() -> Kernels | None:
    """Build and load them. None where that cannot be: then `build.outcomes[NAME].reason` says why."""
    return kernels() if build.operators(NAME, SOURCES).library else None


def kernels() -> Kernels:
    """The loaded operators, those of several tensors under their views."""
    ops = torch.ops.gapless
    return Kernels(
        "native",
        linear,
        ops.rms_norm.default,
        ops.add_rms_norm.default,
        unpack.rope_and_write(ops.rope_and_write.default),
        ops.silu_mul.default,
        unpack.decode_attention(ops.decode_attention.default),
        unpack.prefill_attention(ops.prefill_attention.default),
        cut,
        sample,
        begin_decode,
        finish,
        score,
        begin_mixed,
    )


def cut(logits: Tensor, index: Tensor, rows: Tensor, tables: Tables, filters: Filters) -> None:
    torch.ops.gapless.cut.default(logits, index, rows, tables.state, tables.params)


def sample(logits: Tensor, rows: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    tokens, finite = torch.ops.gapless.sample.default(logits, rows, tables.state, tables.params)
    return tokens, finite


def begin_decode(words: Tensor, counts: Counts, tables: Tables, page_size: int) -> DecodeBatch:
    """See `seam.Kernels.begin_decode`."""
    state, _, history, pages = tables
    ops = torch.ops.gapless
    return DecodeBatch(
        *ops.begin_decode.default(words, counts.rows, counts.page_writes, state, history, pages, page_size)
    )


def begin_mixed(words: Tensor, counts: Counts, tables: Tables, page_size: int) -> MixedBatch:
    """See `seam.Kernels.begin_mixed`."""
    rows, decode, writes, admissions, tokens = counts
    ops = torch.ops.gapless
    return MixedBatch(*ops.begin_mixed.default(words, rows, decode, writes, admissions, tokens, *tables, page_size))


def finish(
    words: Tensor, rows: Tensor, sizes: Tensor | None, tokens: Tensor, finite: Tensor, tables: Tables, lines: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    state, params, history, _ = tables
    torch.ops.gapless.finish.default(words, rows, sizes, tokens, finite, state, params, history, lines, out)


def score(
    logits: Tensor, index: Tensor, words: Tensor, tokens: Tensor, tables: Tables, outboxes: Tensor, start: int,
    width: int,
) -> None:  # fmt: skip
    torch.ops.gapless.score.default(logits, index, words, tokens, tables.state, outboxes, start, width)


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Ours where the processor multiplies bfloat16; oneDNN's for the rest."""
    if weight.dtype == torch.bfloat16 and torch.ops.gapless.has_bf16_dot():
        return NativeLinear(weight, bias)
    return torch_linear.Linear(weight, bias)


def invariant(kernels: Kernels) -> Kernels:
    """Those whose rows do not depend on their batch: in a prompt's chunk a query gets the bits of decode attention."""
    prefill = unpack.prefill_attention(torch.ops.gapless.invariant_prefill_attention.default)
    return kernels._replace(linear=invariant_linear, prefill_attention=prefill)


def product() -> str:
    """What multiplies bfloat16 here, and why nothing faster does: a text for people."""
    vectors = f"torch, {torch.backends.cpu.get_cpu_capability()}"
    if load() is None:
        return f"{vectors}; the C++ kernels are not built"
    if not torch.ops.gapless.has_bf16_dot():
        return f"{vectors}; AVX512-BF16: not in this processor, or unknown to the compiler"
    missing = torch.ops.gapless.amx_missing()
    return f"AVX512-BF16; AMX: {missing}" if missing else "AMX"


def invariant_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Ours in every dtype: oneDNN promises nothing about the order of its sums."""
    ours = linear(weight, bias)
    return ours if isinstance(ours, NativeLinear) else WideLinear(weight, bias)


class WideLinear:
    """x [T, in] -> x @ weight.T + bias [T, out] in float32 or bfloat16, on any processor.

    Each output is one chain of float32 sums over ascending inputs, so it does not depend on the other rows of x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs = weight.shape[0]
        self.weight: Tensor = torch.ops.gapless.linear_pack_wide.default(weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        found: Tensor = torch.ops.gapless.linear_wide.default(x, self.weight, self.outputs, self.bias)
        return found if out is None else out.copy_(found)


class NativeLinear:
    """x [T, in] -> x @ weight.T + bias [T, out] in bfloat16, over the one packed copy of the weight.

    The processor fixes the order of an output's float32 sums, so it does not depend on the other rows of x.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.weight: Tensor = torch.ops.gapless.linear_pack.default(weight.contiguous())
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        found: Tensor = torch.ops.gapless.linear_packed.default(x, self.weight, self.outputs, self.bias)
        return found if out is None else out.copy_(found)

    def rows(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` int64 [T] in plain order, [T, in]: a tied embedding needs no copy of its own."""
        out: Tensor = torch.ops.gapless.embedding_packed.default(ids, self.weight, self.outputs, self.inputs)
        return out
