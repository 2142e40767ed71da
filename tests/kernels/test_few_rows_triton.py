"""Products of few rows in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.adapt_fused_triton import MOST_HELD, NO_ADAPTERS, NORM_WARPS, adapted_norm_kernel, shares_of
from gapless.kernels.few_rows import FEW_ROWS
from gapless.kernels.few_rows_triton import FewRowsTiles, is_vector, matrix_kernel, rows_in_turn_kernel, tiles_for
from gapless.kernels.joined_rows import JOINED_ROWS
from gapless.kernels.library_triton import LARGE_BLOCK
from gapless.kernels.linear import TorchLinear

TYPES = dict.fromkeys(("x", "norm", "weight", "bias", "out", "table"), "*bf16") | {
    "parts": "*fp32", "arrived": "*i32", "eps": "fp32", "M": "i32", "inner": "*fp32", "slots": "*i64",
}  # fmt: skip


class Matrix(NamedTuple):
    columns: int
    depth: int
    norm: bool = False
    gated: bool = False
    projections: tuple[int, ...] = ()
    """The ends of their columns, where rows have adapters"""

    def tiles(self, rows: int, capability: int) -> FewRowsTiles:
        large = aot.SHARED_LIMITS[capability] >= LARGE_BLOCK
        adapted = bool(self.projections) and self.norm
        return tiles_for(rows, self.columns, self.depth, large, capability == 90, adapted)

    def whole(self, rows: int, capability: int) -> bool:
        """Whether a program loads its part of the weight at once."""
        tiles = self.tiles(rows, capability)
        return tiles.depth * tiles.splits >= self.depth

    def build(self, rows: int, capability: int) -> aot.Resources:
        tiles = self.tiles(rows, capability)
        vector = is_vector(rows, self.columns * self.depth)
        constants: dict[str, Any] = {
            "N": self.columns, "K": self.depth, "BIAS": False, "GATED": self.gated, "ADD": not self.norm,
            "EARLY": capability >= 90, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth, **NO_ADAPTERS,
        }  # fmt: skip
        if self.projections:
            constants |= {
                "ADAPT": True, "RANK": 16, "PROJECTIONS": len(self.projections), "FIRST": self.projections[0],
                "SECOND": self.projections[min(1, len(self.projections) - 1)], "SHARES": shares_of(self.depth, rows),
            }  # fmt: skip
        if vector:
            constants |= {"ROWS": rows, "NORM": self.norm and not self.projections}
        else:
            constants |= {"BLOCK_M": max(16, rows), "SPLITS": tiles.splits}
        kernel = rows_in_turn_kernel if vector else matrix_kernel
        types = {name: TYPES[name] for name in kernel.arg_names if name not in constants}
        free = [] if vector else ["M"]
        return aot.build(kernel, capability, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=free)


MATRICES = {
    "qkv": Matrix(4096, 1024, True),
    "output": Matrix(1024, 2048),
    "gate_up": Matrix(6144, 1024, True, True),
    "down": Matrix(1024, 3072),
    "deep": Matrix(4096, 12288),
}


ADAPTED = {
    "qkv": Matrix(4096, 1024, True, projections=(2048, 3072, 4096)),
    "output": Matrix(1024, 2048, projections=(1024,)),
    "gate_up": Matrix(6144, 1024, True, True, projections=(3072, 6144)),
    "down": Matrix(1024, 3072, projections=(1024,)),
    "wide": Matrix(12288, 2048, True, True, projections=(6144, 12288)),
}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("few_rows")


SPILLED = {120: 8}
"""Capability -> bytes: in two of its kernels ptxas moves two registers aside, once or twice a program, though it has
more to give."""


@pytest.mark.parametrize(("name", "rows", "capability"), aot.spread([80, 86, 90, 100, 120], MATRICES, [1, 2, 16, 32]))
def test_compiled_ahead_of_time(name: str, rows: int, capability: int) -> None:
    used, whole = MATRICES[name].build(rows, capability), MATRICES[name].whole(rows, capability)
    assert used.trouble(capability, SPILLED.get(capability, 0)) == []
    vector = is_vector(rows, MATRICES[name].columns * MATRICES[name].depth)
    if vector:
        assert ".v4.b32" in used.ptx, "weights are loaded eight at a time"
    else:
        assert whole or "cp.async" in used.ptx
        assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(capability, "mma.sync") in used.ptx
    if capability >= 90:
        before = used.ptx[: used.ptx.index("griddepcontrol.wait")]
        asked = ".v4.b32" if vector or whole else "prefetch.global.L2"
        assert asked in before, "the weight is asked for before the kernel in front has ended"
        assert not whole or vector or "st.shared" in before, "and is in shared memory"


@pytest.mark.parametrize(("name", "rows", "capability"), aot.spread([80, 90, 100], ADAPTED, [1, 2, 32]))
def test_products_of_rows_with_adapters_are_compiled_ahead_of_time(name: str, rows: int, capability: int) -> None:
    used = ADAPTED[name].build(rows, capability)
    assert used.trouble(capability) == []
    if capability == 90 and not name.startswith(("output", "down")):
        before = used.ptx[: used.ptx.index("griddepcontrol.wait")]
        assert before.count("ld.global") > 16, "adapters are asked for before the kernel in front has ended"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("width", "chunk", "projections", "shares", "rows"),
    [(1024, 16, 3, 1, 32), (1024, 16, 3, 2, 256), (4096, 4, 2, 3, 32)],
)
def test_a_norm_of_rows_with_adapters_compiles_ahead_of_time(
    width: int, chunk: int, projections: int, shares: int, rows: int, capability: int
) -> None:
    constants = {
        "WIDTH": width, "SHARES": shares, "RANK": 16, "LINES": 16 * projections, "PROJECTIONS": projections,
        "EARLY": capability >= 90, "BLOCK_M": rows, "BLOCK": width, "CHUNK": chunk, "HOLD": 16,
        "TILES": projections if rows <= MOST_HELD else 1,
    }  # fmt: skip
    kinds = TYPES | dict.fromkeys(("changed", "up", "down"), "*bf16") | {"before": "*fp32"}
    types = {name: kinds[name] for name in adapted_norm_kernel.arg_names if name not in constants}
    used = aot.build(adapted_norm_kernel, capability, types, constants, warps=NORM_WARPS, stages=3, unaligned=["M"])
    assert used.trouble(capability) == []
    assert rows <= MOST_HELD or used.registers <= 128, "two programs share a multiprocessor"


def test_large_models_have_torchs_products_and_adapters_below_their_matrices() -> None:
    def layer(columns: int, depth: int) -> TorchLinear:
        return TorchLinear(torch.empty(columns, depth, dtype=torch.bfloat16, device="meta"))

    largest = {
        "0.6B": layer(6144, 1024),
        "1.7B": layer(12288, 2048),
        "4B": layer(19456, 2560),
        "8B": layer(24576, 4096),
    }
    assert [name for name, one in largest.items() if not FEW_ROWS.serves(one)] == ["8B"]
    assert [name for name, one in largest.items() if JOINED_ROWS.serves(one)] == ["1.7B", "4B", "8B"]
