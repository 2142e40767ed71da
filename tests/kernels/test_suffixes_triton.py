"""The kernels for drafts from other answers in Triton, without a GPU: in the interpreter, and compiled for three."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.suffixes_triton import recall_kernel, remember_kernel

TABLES = {name: "*i32" for name in ("rows", "state", "settings", "history", "suffixes")}
SIZES = {"HISTORY": 40960, "ENTRIES": 1 << 18}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("suffixes")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_noting_what_followed_compiles_ahead_of_time(capability: int) -> None:
    types = {**TABLES, "tokens": "*i32", "count": "i32"}
    constants = {**SIZES, "WIDTH": 5, "LONGEST": 8, "BLOCK": 64}
    unaligned = ("rows", "tokens", "count")
    used = aot.build(remember_kernel, capability, types, constants, warps=4, stages=3, unaligned=unaligned)
    assert not used.trouble(capability) and used.registers <= 128


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_drafting_from_other_answers_compiles_ahead_of_time(capability: int) -> None:
    types = {**TABLES, "matches": "*i32", "factor": "i32", "least": "i32"}
    constants = {**SIZES, "MOST": 4, "PARTS": 3}
    unaligned = ("rows", "factor", "least")
    used = aot.build(recall_kernel, capability, types, constants, warps=1, stages=3, unaligned=unaligned)
    assert not used.trouble(capability) and used.registers <= 128
