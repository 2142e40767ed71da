"""Masks in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.masks_triton import LOOKS, WORDS, fetch_kernel, late_kernel, reply_kernel

COMMON = dict.fromkeys(("index", "rows", "state", "settings", "history", "mail", "mail_words"), "*i32") | {
    "mail_words": "i32"
}  # fmt: skip
SHAPE, TOKENS = {"HISTORY": 4096}, {"tokens": "*i32"}
FETCH = {"ROOM": 9, "PLACES": 5, "COUNT": 4748, "WORDS": WORDS, "ALIGN": 4}
KERNELS = {
    "late": (late_kernel, {}, SHAPE | {"PLACES": 1, "LANES": 2, "LOOKS": LOOKS}, 1),
    "late after drafts": (late_kernel, {}, SHAPE | {"PLACES": 5, "LANES": 8, "LOOKS": LOOKS}, 1),
    "fetch": (fetch_kernel, {"masks": "*i32"}, FETCH, 4),
    "reply": (reply_kernel, TOKENS, SHAPE | {"WIDTH": 1, "DRAFTS": 0, "MOST": 0, "LANES": 1}, 1),
    "reply with drafts": (reply_kernel, TOKENS, SHAPE | {"WIDTH": 5, "DRAFTS": 4, "MOST": 4, "LANES": 8}, 1),
}


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("masks")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles_ahead_of_time(name: str, capability: int) -> None:
    kernel, types, constants, warps = KERNELS[name]
    types = {name: kind for name, kind in (COMMON | types).items() if name in kernel.arg_names}
    used = aot.build(kernel, capability, types, constants, warps=warps, stages=3, unaligned=["rows"])
    assert not used.trouble(capability) and used.registers <= 128
