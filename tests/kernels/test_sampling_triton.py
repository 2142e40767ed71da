"""Sampling in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels import cut_triton
from gapless.kernels.sampling_triton import (
    CHUNKS,
    MANY_ROWS_BLOCKS,
    SAMPLING_BLOCK,
    best_kernel,
    choose_kernel,
    drawn_kernel,
)

VOCAB = 151_936
TABLES = {"rows": "*i32", "state": "*i32", "settings": "*i32"}
PARTS = {"values": "*fp32", "noisy": "*fp32", "noisy_ids": "*i32"}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("sampling")


@pytest.mark.parametrize(
    ("dtype", "blocks", "capability"),
    aot.spread([80, 90, 100], ["*fp32", "*bf16"], [CHUNKS[0][1], MANY_ROWS_BLOCKS]),
)
def test_the_search_compiles_ahead_of_time(dtype: str, blocks: int, capability: int) -> None:
    constants = {"VOCAB": VOCAB, "ROOM": 1, "BLOCKS": blocks, "BLOCK": SAMPLING_BLOCK, "LANES": 256}
    types = {"logits": dtype, "adjusted": "*fp32", **TABLES, "masks": "*i32", "slots": "i32", "batch": "i32"}
    free, found = ["rows", "slots", "batch"], {"values": "*fp32", "ids": "*i32"}
    used = aot.build(best_kernel, capability, types | found, constants, warps=4, stages=3, unaligned=free)
    assert not used.trouble(capability) and used.registers <= 80
    constants |= {"SPLITS": 149}
    used = aot.build(drawn_kernel, capability, types | PARTS, constants, warps=4, stages=3, unaligned=free)
    assert not used.trouble(capability) and used.registers <= 128


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_choice_compiles_ahead_of_time(capability: int) -> None:
    types = {
        "rows": "*i32",
        "settings": "*i32",
        "batch": "i32",
        **PARTS,
        "ids": "*i32",
        "tokens": "*i64",
        "finite": "*i1",
    }
    constants = {"VOCAB": VOCAB, "SPLITS": 149, "LANES": 256}
    used = aot.build(choose_kernel, capability, types, constants, warps=1, stages=3, unaligned=["rows", "batch"])
    assert not used.trouble(capability) and used.registers <= 96


PASSES = {"begin": cut_triton.begin_kernel, "count": cut_triton.count_kernel, "weigh": cut_triton.weigh_kernel}
NUMBERS = ("batch", "slots", "top_k", "counts", "level", "shift")


@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("tile", [cut_triton.FEW_ROWS_TILE, cut_triton.CUT_TILE])
def test_the_cut_compiles_ahead_of_time(dtype: str, name: str, tile: int) -> None:
    kernel = PASSES[name]
    constants = {"VOCAB": VOCAB, "ROOM": 1, "TILE": tile, "BITS": 32 if dtype == "*fp32" else 16, "LANES": 256}
    constants |= {"CLEARED": 2048, "EARLY": True}
    types = {"logits": dtype, "index": "*i32", **TABLES, "masks": "*i32", "search": "*i64", "tops": "*i64"}
    types |= {"parts": "*i16"} | dict.fromkeys(NUMBERS, "i32")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    free = [name for name in ("rows", *NUMBERS) if name in types]
    most = cut_triton.COUNT_REGISTERS if kernel is cut_triton.count_kernel else None
    used = aot.build(kernel, 90, types, constants, warps=4, stages=3, unaligned=free, registers=most)
    assert not used.trouble(90) and used.registers <= 128
    assert ("griddepcontrol.wait" in used.ptx) == (kernel is not cut_triton.begin_kernel)
    # An exponential of each token, and no more than one for each digit of a pass beside them.
    assert used.ptx.count("ex2") <= tile // 128 + 3 or kernel is cut_triton.count_kernel
