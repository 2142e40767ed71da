"""Checksums of pages in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.pages_triton import TILE, page_kernel


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("pages")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_ahead_of_time(capability: int) -> None:
    types = {"page": "*i32", "total": "*i64", "words": "i32"}
    used = aot.build(page_kernel, capability, types, {"TILE": TILE}, warps=8, stages=3, unaligned=["total"])
    assert not used.trouble(capability) and used.registers <= 128
