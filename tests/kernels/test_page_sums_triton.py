"""Copies of pages and their checksums in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.pages_triton import COPY_TILE, copy_kernel, copy_pages


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("pages")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_ahead_of_time(capability: int) -> None:
    types = {"src": "*i32", "dst": "*i32", "places": "*i32", "sums": "*i64"}
    types |= dict.fromkeys(("count", "words", "src_stride", "dst_stride"), "i32")
    used = aot.build(
        copy_kernel, capability, types, {"TILE": COPY_TILE}, warps=8, stages=3, unaligned=["count", "places", "sums"]
    )
    assert not used.trouble(capability) and used.registers <= 128


def test_groups_of_any_number_of_pages_share_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    pages, places = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    sums = torch.zeros(8, dtype=torch.int64)
    with aot.launches_compile(90):
        before = aot.compiled(copy_kernel)
        for first, count in ((0, 2), (0, 1), (1, 2), (2, 3)):  # where the places of a group begin, and how many it has
            here = places[2 * first : 2 * (first + count)].view(2, -1)
            copy_pages(pages, pages, here, sums[first : first + count])
        assert aot.compiled(copy_kernel) - before == 1
