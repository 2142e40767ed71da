"""Sampling in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.sampling_triton import BLOCK, CHUNKS, MANY_ROWS_BLOCKS, _best, _choose, _drawn

VOCAB = 151_936
TABLES = {"rows": "*i64", "state": "*i32", "settings": "*i32"}
PARTS = {"values": "*fp32", "noisy": "*fp32", "noisy_ids": "*i32"}


def test_in_the_interpreter() -> None:
    interpreter.run("sampling")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("blocks", [CHUNKS[0][1], MANY_ROWS_BLOCKS])
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16"])
def test_the_search_compiles_ahead_of_time(dtype: str, blocks: int, capability: int) -> None:
    constants = {"VOCAB": VOCAB, "BLOCKS": blocks, "BLOCK": BLOCK, "LANES": 256}
    types = {"logits": dtype, "values": "*fp32", "ids": "*i32"}
    used = aot.build(_best, capability, types, constants, warps=4, stages=3)
    assert not used.trouble(capability) and used.registers <= 64
    types = {"logits": dtype, **TABLES, **PARTS}
    used = aot.build(_drawn, capability, types, {**constants, "SPLITS": 149}, warps=4, stages=3)
    assert not used.trouble(capability) and used.registers <= 96


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_choice_compiles_ahead_of_time(capability: int) -> None:
    types = {"rows": "*i64", "settings": "*i32", **PARTS, "ids": "*i32", "tokens": "*i64", "finite": "*i1"}
    constants = {"VOCAB": VOCAB, "SPLITS": 149, "LANES": 256, "RANDOM": True}
    used = aot.build(_choose, capability, types, constants, warps=1, stages=3)
    assert not used.trouble(capability) and used.registers <= 96
