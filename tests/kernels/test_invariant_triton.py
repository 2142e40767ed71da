"""The kernels that do not depend on the batch, without a GPU: in the interpreter, and compiled for GPUs.

`PYTHONPATH=. python tests/kernels/test_invariant_triton.py` prints what all variants take.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from aot import Resources, build, compiled, launches_compile
from interpreter import run
from paged import Heads, paged, queries

# Importing aot skips this file where there is no triton.
from gapless.kernels import invariant_attention_triton as attention
from gapless.kernels import invariant_linear_triton as linear

CAPABILITIES = (80, 86, 90, 100, 120)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class Product(NamedTuple):
    """A product for a GPU; the numbers are those of a layer of Qwen3-0.6B."""

    rows: int
    columns: int = 1024
    depth: int = 3072
    dtype: str = "bf16"

    def build(self, capability: int) -> Resources:
        tiles = linear.tiles_for(self.rows, self.columns, self.depth, BYTES[self.dtype], capability in (90, 100))
        constants = {
            "N": self.columns, "K": self.depth, "BIAS": True, "SEGMENT": tiles.segment,
            "SEGMENTS": -(-self.depth // tiles.segment), "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns,
            "BLOCK_K": tiles.depth,
        }  # fmt: skip
        types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{self.dtype}")
        types |= {"parts": "*fp32", "arrived": "*i32", "rows": "i32", "each": "i32"}
        how = {"warps": tiles.warps, "stages": tiles.stages, "unaligned": ("rows", "each")}
        return build(linear.product_kernel, capability, types, constants, **how)


class Attention(NamedTuple):
    dim: int
    group: int = 2
    dtype: str = "bf16"

    def build(self, capability: int) -> Resources:
        kernel = attention.attention_kernel
        tiles = attention.tiles_for(self.dim, BYTES[self.dtype], self.group, capability in (90, 100))
        constants: dict[str, Any] = {
            "HEADS": 8, "GROUP": self.group, "D": self.dim, "PAGE": 16, "BLOCK_M": tiles.rows,
            "BLOCK_Q": attention.queries_of(tiles, self.group), "BLOCK_N": tiles.entries,
            "LEAST": attention.LEAST_IN_SEGMENT, "MOST": attention.MOST_SEGMENTS,
        }  # fmt: skip
        known = {"table": "*i32", "rows": "*i64", "starts": "*i64", "lens": "*i64", "scale": "fp32"}
        known |= dict.fromkeys(("partial", "sums"), "*fp32") | dict.fromkeys(("q", "cache", "out"), f"*{self.dtype}")
        types = {name: known.get(name, "i32") for name in kernel.arg_names if name not in constants}
        free = ("layer", "tokens", "chunks", "single", "most", *attention.TABLES)
        return build(kernel, capability, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=free)


TESTED = (Product(1), Product(2048), Attention(64), Attention(128))
MORE = (
    *(Product(rows, 4096, 1024) for rows in (1, 2048)),
    *(Product(rows, 1024, 3072, "fp32") for rows in (1, 2048)),
    *(Attention(dim, group) for dim in (64, 128) for group in (1, 4, 7)),
    *(Attention(dim) for dim in (80, 256)),
    *(Attention(dim, 2, "fp32") for dim in (64, 128)),
)


@functools.cache
def built(variant, capability):
    return variant.build(capability)


def test_kernels_pass_their_tests_in_the_interpreter():
    run("invariant")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Compiled now, not found."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def instructions(ptx: str) -> set[str]:
    """The tensor cores' instructions, with their shapes."""
    return set(re.findall(r"wgmma\.mma_async\S*|mma\.sync\S*|tcgen05\.mma\S*", ptx))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("variant", TESTED, ids=str)
def test_a_compiled_kernel_fits_its_gpu(variant, capability, own_cache):
    found = built(variant, capability)
    assert found.trouble(capability) == []
    assert "cp.async" in found.ptx and instructions(found.ptx)


@pytest.mark.parametrize("capability", (80, 90))
def test_few_rows_and_many_multiply_by_one_instruction(capability, own_cache):
    few, many = (instructions(built(Product(rows), capability).ptx) for rows in (1, 2048))
    assert few == many and len(few) == 1


def test_one_kernel_serves_every_batch(own_cache, monkeypatch):
    """Products of up to 256 rows, whichever program computes a segment; attention of decode rows and of chunks."""
    for module in (linear, attention):
        monkeypatch.setattr(module, "has_warpgroups", lambda device: True)
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(linear, "counters", lambda device, count: torch.zeros(8, dtype=torch.int32))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    bf16, heads = torch.bfloat16, Heads(16, 8, 128)
    batch, small = paged(heads, [40, 600, 70, 1], dtype=bf16, width=2560), torch.zeros(20, dtype=torch.int64)
    q, x, weight = queries(heads, 40, dtype=bf16), torch.zeros(256, 1024, dtype=bf16), torch.zeros(4096, 1024)
    with launches_compile(90):
        for rows in (1, 2, 16, 17, 256):
            linear.product(x[:rows], weight.to(bf16), None)
        for rows, layer in ((4, 0), (1, 1), (2, 16)):
            lens, args = small[rows : 2 * rows], (batch.cache, layer, batch.page_table)
            attention.invariant_decode(q[:rows], *args, lens, lens, 0.1)
            attention.invariant_decode(q[:rows], *args, lens, lens, 0.1, shares=1)
            attention.invariant_prefill(q[rows:], *args, lens, small[1 : 2 + rows], lens, 0.1, 512)
    kinds = (linear.product_kernel, attention.attention_kernel, attention.combine_kernel)
    assert [compiled(kind) for kind in kinds] == [1, 1, 1]


def main() -> None:
    for variant in TESTED + MORE:
        for capability in CAPABILITIES:
            found = variant.build(capability)
            said = "; ".join(found.trouble(capability)) or "fits"
            print(f"sm_{capability:<4}{variant} registers {found.registers} shared {found.shared} {said}", flush=True)


if __name__ == "__main__":
    main()
