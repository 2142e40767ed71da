"""Scores in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.layout import score_words
from gapless.kernels.score_triton import SCORE_TILE, line_kernel, spread_kernel

VOCAB, SPLITS = 151_936, 75
PARTS = {"tokens": "*i32", "sums": "*fp32", "before": "*i32", "best": "*i64"}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("score")


@pytest.mark.parametrize(("dtype", "width", "capability"), aot.spread([80, 90, 100], ["*fp32", "*bf16"], [0, 5, 20]))
def test_the_spread_compiles_ahead_of_time(dtype: str, width: int, capability: int) -> None:
    constants = {"COLUMNS": 1, "VOCAB": VOCAB, "TILE": SCORE_TILE, "SPLITS": SPLITS, "WIDTH": width}
    types = {"logits": dtype, "index": "*i32", **PARTS, "batch": "i32"}
    used = aot.build(spread_kernel, capability, types, constants, warps=4, stages=3, unaligned=["batch"])
    assert not used.trouble(capability) and used.registers <= 128


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("width", [0, 5, 20])
def test_the_line_compiles_ahead_of_time(width: int, capability: int) -> None:
    counts = ("batch", "slots", "slot_words", "start")
    types = {
        "logits": "*bf16", "index": "*i32", "words": "*i32", "state": "*i32", **PARTS, "outboxes": "*i32",
        **dict.fromkeys(counts, "i32"),
    }  # fmt: skip
    line = score_words(width)
    constants = {"COLUMNS": 1, "VOCAB": VOCAB, "SPLITS": SPLITS, "WIDTH": width, "LINE": line, "LANES": 128}
    constants |= {"BEST_LANES": 1 << (SPLITS * max(width, 1)).bit_length(), "LINE_LANES": 1 << line.bit_length()}
    used = aot.build(line_kernel, capability, types, constants, warps=4, stages=3, unaligned=counts)
    assert not used.trouble(capability) and used.registers <= 128
