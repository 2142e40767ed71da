"""The beginning and the end of a step in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.begin_triton import begin_decode_kernel
from gapless.kernels.finish_triton import finish_kernel, stops_at_once
from gapless.kernels.layout import line_words
from gapless.kernels.mixed_triton import MIXED_BLOCK, apply_kernel, gather_kernel

TABLES = {"words": "*i32", "state": "*i32", "history": "*i32"}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("step")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("block", "places"), [(64, 1), (256, 5), (1024, 1)])
def test_begin_decode_compiles_ahead_of_time(block: int, places: int, capability: int) -> None:
    types = {**TABLES, "count": "i32", "writes": "i32", "pages": "*i32", "out": "*i64"}
    constants = {"MAX_LEN": 40960, "MAX_PAGES": 2560, "PAGE": 16, "BLOCK": block, "PLACES": places}
    used = aot.build(
        begin_decode_kernel, capability, types, constants, warps=block // 64, stages=3,
        unaligned=("count", "writes"),
    )  # fmt: skip
    assert not used.trouble(capability) and used.registers <= 96


@pytest.mark.parametrize(
    ("block", "width", "capability"),
    # Steps with drafts have few rows.
    [(64, 1, 90), (256, 1, 90), (1024, 1, 90), (64, 5, 90), (256, 5, 90), (64, 9, 90), (64, 5, 80), (256, 1, 80),
     (1024, 1, 80), (64, 5, 100), (256, 1, 100), (1024, 1, 100)],
)  # fmt: skip
def test_finish_compiles_ahead_of_time(block: int, capability: int, width: int) -> None:
    counts = ("count", "samples", "slots", "slot_words")
    types = {
        **TABLES, "rows": "*i32", "sizes": "*i32", "tokens": "*i64", "finite": "*i1", "settings": "*i32",
        "lines": "*i32", "out": "*i32", **dict.fromkeys(counts, "i32"),
    }  # fmt: skip
    line = line_words(width)
    constants = {"HISTORY": 40960, "SIZES": True, "BLOCK": block, "GROUP": stops_at_once(block)}
    constants |= {"WIDTH": width, "LINE": line, "COLUMNS": 1 << (line - 1).bit_length()}
    unaligned = set(counts) - {"slot_words"}  # a slot is whole 64 bytes
    used = aot.build(finish_kernel, capability, types, constants, warps=block // 32, stages=3, unaligned=unaligned)
    assert not used.trouble(capability)
    assert used.registers <= 65_536 // block, "all of a block's threads fit into one multiprocessor"
    lines = [line for line in used.ptx.splitlines() if "st.global" in line or "atom." in line]
    assert ".sys.acq_rel." in lines[-2] and "st.global" in lines[-1], (
        "the header follows a fence that the host sees too"
    )
    assert any("st.global.v4.b32" in line for line in lines), "a line of the outbox is one store"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("places", [1, 5])
def test_begin_mixed_compiles_ahead_of_time(places: int, capability: int) -> None:
    counts = ("count", "writes", "admissions")
    types = {"words": "*i32", "state": "*i32", "settings": "*i32", "pages": "*i32", **dict.fromkeys(counts, "i32")}
    used = aot.build(
        apply_kernel, capability, types, {"BLOCK": MIXED_BLOCK, "COLUMNS": 64}, warps=2, stages=3, unaligned=counts
    )
    assert not used.trouble(capability) and used.registers <= 64
    counts = ("count", "decode", "tokens", "sent", "splits")
    types = {**TABLES, "pages": "*i32", "by_row": "*i64", "by_token": "*i64", **dict.fromkeys(counts, "i32")}
    constants = {"MAX_LEN": 40960, "MAX_PAGES": 2560, "PAGE": 16, "BLOCK": MIXED_BLOCK, "ROWS": 1024, "PLACES": places}
    used = aot.build(gather_kernel, capability, types, constants, warps=2, stages=3, unaligned=counts)
    assert not used.trouble(capability) and used.registers <= 128
