"""The attention kernels compiled for GPUs that are not here: they fit, and use tensor cores and asynchronous copies.

`PYTHONPATH=. python tests/kernels/test_attention_aot.py` prints what every variant takes, those of the tests and more.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from aot import Resources, build, compiled, launches_compile
from paged import Heads, paged, queries

# Importing aot skips this file where there is no triton.
from gapless.kernels import attention_triton as kernels
from gapless.kernels import splits_triton

KV_HEADS, PAGE = 8, 16
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FREE = (
    "layer",
    "batch",
    "wanted",
    "at_once",
    "least",
    "most",
    "whole",
    "tokens",
    "chunks",
    "rows",
    "starts",
    "lens",
    "positions",
    "slots",
)
"""What a launch does not specialise."""


class Variant(NamedTuple):
    kernel: str
    dim: int
    dtype: str = "bf16"
    group: int = 2
    turn: bool = False
    many: bool = False
    split: bool = False

    def build(self, capability: int) -> Resources:
        kernel = getattr(kernels, f"{self.kernel}_kernel")
        constants, tiles = self._constants(capability)
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {name: self._type(name) for name in kernel.arg_names if name not in constants}
        free = [name for name in FREE if name in types]
        return build(kernel, capability, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=free)

    def _constants(self, capability: int) -> tuple[dict[str, Any], Any]:
        size = BYTES[self.dtype]
        if self.kernel == "prefill":
            tiles = kernels.prefill_tiles(self.dim, size, self.group, 512)
        else:
            tiles = kernels.decode_tiles(self.dim, size, self.group, self.many)
        if self.kernel.startswith("combine"):
            tiles = tiles._replace(warps=4, stages=1)
        many = self.many or self.kernel == "combine"
        return {
            "HEADS": KV_HEADS, "GROUP": self.group, "D": self.dim, "PAGE": PAGE, "BLOCK_M": tiles.rows,
            "BLOCK_Q": tiles.rows // self.group, "BLOCK_N": tiles.entries, "RUN": PAGE,
            "SPLITS_PAD": splits_triton.MOST_SPLITS if many else 2, "EARLY": capability >= 90, "MAX_LEN": 4096,
            "TURN": self.turn, "NORM": self.turn, "MANY": self.many, "SPLIT": self.split,
        }, tiles  # fmt: skip

    def _type(self, name: str) -> str:
        known = {"table": "*i32", "arrived": "*i32", "rows": "*i64", "starts": "*i64", "lens": "*i64", "scale": "fp32"}
        known |= {"positions": "*i64", "slots": "*i64", "angles": "*fp32", "eps": "fp32"}
        known |= dict.fromkeys(("q", "cache", "out", "qk_norm"), f"*{self.dtype}") | dict.fromkeys(
            ("partial", "logs"), "*fp32"
        )
        return known.get(name, "i32")


TURNS = Variant("decode", 128, turn=True)
MANY = TURNS._replace(many=True)
"""Decode of up to four rows, and of more"""
TESTED = (
    Variant("decode", 64),
    Variant("decode", 128),
    TURNS,
    MANY._replace(dim=64),
    MANY,
    Variant("prefill", 64),
    Variant("prefill", 128),
    Variant("prefill", 128, split=True),
)
MORE = (
    *(Variant(kernel, dim) for kernel in ("decode", "prefill") for dim in (80, 96, 256)),
    *(Variant(kernel, 128, "bf16", group) for kernel in ("decode", "prefill") for group in (1, 4, 7)),
    *(Variant(kernel, dim, "fp32") for kernel in ("decode", "prefill") for dim in (64, 128, 256)),
    *(Variant("decode", dim, many=True) for dim in (64, 128, 256)),
    Variant("decode", 256, turn=True, many=True),
    *(Variant("combine", dim) for dim in (64, 128, 256)),
)
CAPABILITIES = (90, 100)
ELSEWHERE = (
    *((variant, 100) for variant in (Variant("decode", 64), MANY, Variant("prefill", 64), Variant("prefill", 128))),
    *((variant, 80) for variant in (MANY, Variant("prefill", 128))),
)
"""sm_100 gets every size and setting in as few kernels as that takes, an older GPU what needs most of one."""
SMALL_BLOCKS = (86, 120)
"""GPUs whose blocks have less shared memory: all is compiled for one, and every size and setting for the other."""
SHARING = (
    *(TURNS._replace(group=group) for group in (4, 7)),
    *(MANY._replace(group=group) for group in (4, 7, 8)),
    *(one._replace(dim=96) for one in (TURNS, MANY)),
    MANY._replace(dim=64, group=7),
)
"""What Llama, Qwen2 and models of heads of 96 run in steps of few rows"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compiled now, not found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("variant, capability", [*product(TESTED, (90,)), *ELSEWHERE], ids=str)
def test_a_compiled_kernel_fits_its_gpu(variant, capability):
    found = variant.build(capability)
    assert found.trouble(capability) == []
    assert "cp.async" in found.ptx
    if variant.kernel == "prefill":
        assert {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability] in found.ptx
    else:
        assert "mma.sync" in found.ptx


@pytest.mark.parametrize("variant", SHARING, ids=str)
def test_decode_of_other_models_fits(variant):
    """ptxas may move two registers aside where heads are padded, or their number is."""
    assert variant.build(90).trouble(90, 8) == []


@pytest.mark.parametrize(
    "variant, capability",
    (
        *((variant, 120) for variant in (TURNS, MANY, Variant("decode", 128), Variant("prefill", 128))),
        *product((MANY._replace(group=7), Variant("decode", 256), Variant("prefill", 256)), SMALL_BLOCKS),
    ),
    ids=str,
)
def test_a_kernel_fits_small_blocks(variant, capability):
    """Prefill has more sums there than registers: it keeps up to 32 of a thread in memory."""
    assert variant.build(capability).trouble(capability, 128 if variant.kernel == "prefill" else 0) == []


@pytest.mark.parametrize("kernel", ("combine", "combine_chunks"))
def test_the_combining_kernels_fit(kernel):
    assert Variant(kernel, 128).build(90).trouble(90) == []


def test_launches_that_differ_in_what_tensors_hold_and_where_they_begin_compile_once(monkeypatch):
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: 132)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    heads, small = Heads(16, 8, 128), torch.zeros(20, dtype=torch.int64)
    batch = paged(heads, [40, 600, 70, 1], dtype=torch.bfloat16, width=2560)
    q = queries(heads, 40, dtype=torch.bfloat16)
    with launches_compile(90):
        for rows, layer in ((4, 0), (3, 1), (2, 16)):
            lens = small[rows : 2 * rows]
            kernels.decode_attention(q[:rows], batch.cache, layer, batch.page_table, lens, lens, 0.1)
            chunks = (lens, small[1 : 2 + rows], lens)
            kernels.prefill_attention(q[rows:], batch.cache, layer, batch.page_table, *chunks, 0.1, 512)
    kinds = (kernels.decode_kernel, kernels.combine_kernel, kernels.prefill_kernel, kernels.combine_chunks_kernel)
    assert [compiled(kind) for kind in kinds] == [1, 1, 1, 1]


def main() -> None:
    for variant in TESTED + SHARING + MORE:
        for capability in CAPABILITIES + SMALL_BLOCKS:
            began = time.process_time()
            r = variant.build(capability)
            said = "; ".join(r.trouble(capability)) or "fits"
            print(f"sm_{capability:<4}{variant.kernel:8} D {variant.dim:<4}{variant.dtype} group {variant.group} "
                  f"{'many ' if variant.many else ''}registers {r.registers} shared {r.shared} {said} "
                  f"({time.process_time() - began:.1f} s)", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
