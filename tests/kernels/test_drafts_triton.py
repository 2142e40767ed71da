"""The kernels for drafts in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.drafts_triton import MATCH_BLOCK, accept_kernel, look_up_kernel

TABLES = {"rows": "*i32", "state": "*i32", "history": "*i32"}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("drafts")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_acceptance_compiles_ahead_of_time(capability: int) -> None:
    types = {**TABLES, "tokens": "*i64", "finite": "*i1", "out": "*i64", "count": "i32"}
    constants = {"HISTORY": 40960, "PLACES": 5, "WIDTH": 5, "BLOCK": 64}
    used = aot.build(
        accept_kernel, capability, types, constants, warps=2, stages=3, unaligned=("rows", "count")
    )  # fmt: skip
    assert not used.trouble(capability) and used.registers <= 96


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_looking_up_compiles_ahead_of_time(capability: int) -> None:
    types = {**TABLES, "settings": "*i32", "matches": "*i32"}
    constants = {"HISTORY": 40960, "MOST": 4, "SHORTEST": 2, "LONGEST": 4, "BLOCK": MATCH_BLOCK}
    used = aot.build(look_up_kernel, capability, types, constants, warps=4, stages=3, unaligned=("rows",))
    assert not used.trouble(capability) and used.registers <= 128
