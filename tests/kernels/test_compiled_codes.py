"""Products by quantised weights, compiled for GPUs that are not here: each fits, and uses tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
from sharpest import sharpest

from gapless.kernels.coded_triton import QuantisedProduct, QuantisedRow
from gapless.kernels.quantised_triton import FP8, INT4, INT8, quantised_kernel, quantised_row_kernel
from gapless.kernels.tiles import choose_tiles

MULTIPLIES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


class Codes(NamedTuple):
    """A product by a quantised weight of Qwen3-8B."""

    kind: int
    group: int
    rows: int
    columns: int
    depth: int
    gated: bool = False

    @property
    def rounded(self) -> bool:
        return self.kind == FP8.value and self.rows > 1

    def build(self, capability: int | str) -> aot.Resources:
        gpu = aot.GPUS[capability]
        early = gpu.early
        constants: dict[str, Any] = {
            "N": self.columns, "K": self.depth, "KIND": self.kind, "GROUP": self.group, "BIAS": False,
            "GATED": self.gated, "ADD": not self.gated, "EARLY": early,
        }  # fmt: skip
        if self.rows == 1:
            one = choose_tiles(QuantisedRow(self.columns, self.depth, self.kind == INT4.value), gpu)
            wide = 32 if self.kind == INT4.value else 16
            constants |= {"BLOCK_N": one.columns, "CHUNKS": one.chunks, "EACH": one.each}
            constants["SPLITS"] = -(-self.depth // (one.chunks * wide))
            types = CODE_TYPES | {"weight": "*i32", "x": "*i64"}
            kernel, warps, stages, free = quantised_row_kernel, one.warps, 3, ()
        else:
            rounded = self.rounded and gpu.has_e4m3
            tiles = choose_tiles(QuantisedProduct(self.rows, self.columns, self.depth, self.group, rounded), gpu)
            constants |= {"PACKED": early, "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth}
            constants["SPLITS"] = tiles.splits
            types = CODE_TYPES | ({"x": "*fp8e4nv", "weight": "*fp8e4nv"} if rounded else {})
            kernel, warps, stages, free = quantised_kernel, tiles.warps, tiles.stages, ("M",)
        types = {name: types[name] for name in kernel.arg_names if name not in constants}
        return aot.build(kernel, capability, types, constants, warps=warps, stages=stages, unaligned=free)


CODE_TYPES = dict.fromkeys(("x", "bias", "out"), "*bf16") | dict.fromkeys(("factor", "scale", "parts"), "*fp32") | {
    "weight": "*u8", "zero": "*u8", "arrived": "*i32", "M": "i32",
}  # fmt: skip
CODES = [
    Codes(kind, group, rows, *shape)
    for kind, group in ((FP8.value, 0), (INT4.value, 128), (FP8.value, 128), (INT8.value, 0))
    for rows in (1, 8, 32, 256)
    for shape in ((24576, 4096, True), (4096, 12288))
    if rows < 256 or (kind, group) == (FP8.value, 128)
]


@pytest.mark.parametrize(
    ("codes", "capability"),
    sharpest([*((codes, 90) for codes in CODES), *((codes, 80) for codes in CODES[::3]),
              *((codes, 100) for codes in CODES[1::4])], 2, "aot"),
)  # fmt: skip
def test_a_product_by_codes_fits_its_gpu(codes: Codes, capability: int) -> None:
    used = codes.build(capability)
    assert used.trouble(capability) == []
    if codes.rows == 1:
        assert ".v4.b32" in used.code, "sixteen bytes are loaded at a time"
        assert "ftz" not in used.code, "codes may be subnormal numbers"
    else:
        assert "cp.async" in used.code and MULTIPLIES.get(capability, "mma.sync") in used.code
    if capability >= 90:
        before = used.code[: used.code.index("griddepcontrol.wait")]
        assert (".v4.b32" if codes.rows == 1 else "prefetch.global.L2") in before
