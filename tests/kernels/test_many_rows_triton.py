"""Products of many rows in Triton, without a GPU: in the interpreter, and compiled for two GPUs."""

from __future__ import annotations

from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter
import torch

from gapless.kernels import library_triton, many_rows
from gapless.kernels.linear import TorchLinear
from gapless.kernels.many_rows_triton import MOST_MANY_WEIGHT, product_kernel, serves, tiles_for

POINTERS = dict.fromkeys(("matrix", "bias", "out", "norm", "scaled", "given", "down"), "*bf16") | {
    "before": "*fp32", "squares": "*fp32", "inner": "*fp32", "slots": "*i64",
}  # fmt: skip


class Matrix(NamedTuple):
    columns: int
    depth: int
    normed: bool = False
    gated: bool = False
    shares: int = 0
    """In how many shares further programs make the first half of adapters; 0: there are none"""

    def build(self, rows: int, capability: int) -> aot.Resources:
        tiles = tiles_for(rows, self.columns, self.gated)
        types = POINTERS | {"eps": "fp32", "M": "i32"}
        types["x"] = f"tensordesc<bf16[{tiles.rows}, {tiles.depth}]>"
        types["weight"] = f"tensordesc<bf16[{tiles.columns}, {tiles.depth}]>"
        constants = {
            "N": self.columns, "K": self.depth, "BEFORE": 16 if self.normed else 0, "BIAS": False, "GATED": self.gated,
            "ADD": not self.normed, "LEAVE": not self.normed and not self.shares, "EARLY": True,
            "LINES": 16 if self.shares else 0, "SHARES": self.shares, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns,
            "BLOCK_K": tiles.depth,
        }  # fmt: skip
        return aot.build(
            product_kernel, capability, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=["M"]
        )


MATRICES = {
    "qkv": Matrix(4096, 1024, True),
    "output": Matrix(1024, 2048),
    "gate_up": Matrix(6144, 1024, True, True),
    "down": Matrix(1024, 3072),
    "small": Matrix(200, 136),
    "output beside": Matrix(1024, 2048, shares=2),
}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("many_rows")


@pytest.mark.parametrize(("name", "rows", "capability"), aot.spread([90, 100], MATRICES, [128, 256]))
def test_compiled_ahead_of_time(name: str, rows: int, capability: int) -> None:
    used = MATRICES[name].build(rows, capability)
    assert used.trouble(capability) == []
    assert "cp.async.bulk.tensor" in used.ptx, "tiles come by the copy engine"
    assert ("wgmma" if capability == 90 else "tcgen05") in used.ptx
    assert used.ptx.index("prefetch.global") < used.ptx.index("griddepcontrol.wait")
    assert used.ptx.index("griddepcontrol.wait") < used.ptx.index("cp.async.bulk.tensor")


@pytest.mark.parametrize(
    ("capability", "shared", "served"), [((9, 0), 227, True), ((12, 0), 99, False), ((8, 0), 163, False)], ids=str
)
def test_gpus_that_are_left_to_torch(
    capability: tuple[int, int], shared: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tiles fit into large blocks alone, and the copy engine came with Hopper."""
    monkeypatch.setattr(library_triton.facts, "capability", lambda device: capability)
    monkeypatch.setattr(library_triton.facts, "shared_memory", lambda device: shared << 10)
    for name in ("is_hopper", "has_large_blocks"):
        monkeypatch.setattr(many_rows, name, getattr(library_triton, name).__wrapped__)
    layer = TorchLinear(torch.empty(256, 256, dtype=torch.bfloat16, device="meta"))
    assert many_rows.MANY_ROWS.serves(layer) == served


def test_matrices_that_are_left_to_torch() -> None:
    """A large one does not run at once, the copy engine reads rows that begin at multiples of 16 bytes, and a tile is
    not wider than the matrix."""
    found = [
        serves(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))
        for shape in ((6144, 1024), (MOST_MANY_WEIGHT // 1024 + 1, 1024), (64, 1000), (64, 1001), (64, 64))
    ]
    assert found == [True, False, True, False, False]
