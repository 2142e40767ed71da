"""Copies of pages and their checksums in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.pages_triton import PROGRAMS, TILE, copy_kernel


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("pages")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_ahead_of_time(capability: int) -> None:
    types = {"src": "*i32", "dst": "*i32", "places": "*i32", "sums": "*i64"}
    types |= dict.fromkeys(("count", "words", "src_stride", "dst_stride"), "i32")
    sizes = {"TILE": TILE, "PROGRAMS": PROGRAMS}
    used = aot.build(copy_kernel, capability, types, sizes, warps=8, stages=3, unaligned=["count"])
    assert not used.trouble(capability) and used.registers <= 128
