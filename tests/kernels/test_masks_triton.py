"""Masks in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.masks_triton import LOOKS, WORDS, late_kernel, mask_kernel, reply_kernel

COMMON = dict.fromkeys(("index", "rows", "state", "settings", "wishes", "mail", "word_count"), "*i32") | {
    "word_count": "i32"
}  # fmt: skip
HISTORY, SHAPE = {"history": "*i32"}, {"HISTORY": 4096}
KERNELS = {
    "late": (late_kernel, HISTORY, SHAPE | {"PLACES": 1, "LANES": 2, "LOOKS": LOOKS}, 1),
    "late after drafts": (late_kernel, HISTORY, SHAPE | {"PLACES": 5, "LANES": 8, "LOOKS": LOOKS}, 1),
    "mask": (mask_kernel, {"adjusted": "*fp32", "slots": "i32"}, {"VOCAB": 151_936, "PLACES": 5, "WORDS": WORDS}, 4),
    "reply": (reply_kernel, HISTORY | {"tokens": "*i32"}, SHAPE | {"WIDTH": 1, "DRAFTS": 0, "MOST": 0, "LANES": 1}, 1),
    "reply with drafts": (
        reply_kernel,
        HISTORY | {"tokens": "*i32"},
        SHAPE | {"WIDTH": 5, "DRAFTS": 4, "MOST": 4, "LANES": 8},
        1,
    ),
}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("masks")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_ahead_of_time(name: str, capability: int) -> None:
    kernel, types, constants, warps = KERNELS[name]
    used = aot.build(kernel, capability, COMMON | types, constants, warps=warps, stages=3, unaligned=["rows"])
    assert not used.trouble(capability) and used.registers <= 128
