"""Adjusted logits in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.adjust_triton import ADJUST_BLOCK, adjust_kernel

TABLES = ("index", "rows", "state", "settings", "history", "wishes", "counts", "counted")


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("adjust")


@pytest.mark.parametrize(
    ("dtype", "drafts", "capability"),
    [
        ("*bf16", 0, 90),
        *((dtype, drafts, gpu) for dtype, drafts in (("*fp32", 0), ("*bf16", 1)) for gpu in (80, 90, 100)),
    ],
)
def test_it_compiles_ahead_of_time(dtype: str, drafts: int, capability: int) -> None:
    counts = ("batch", "slots")
    types = {"logits": dtype, **dict.fromkeys(TABLES, "*i32"), "adjusted": "*fp32", **dict.fromkeys(counts, "i32")}
    constants = {"VOCAB": 151_936, "HISTORY": 40_960, "BLOCK": ADJUST_BLOCK, "DRAFTS": drafts}
    used = aot.build(adjust_kernel, capability, types, constants, warps=4, stages=3, unaligned=["rows", *counts])
    assert not used.trouble(capability) and used.registers <= 128
