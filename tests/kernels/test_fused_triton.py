"""Norms, rotation and activation in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.activation_triton import _silu_mul
from gapless.kernels.norm_triton import _add_rms_norm, _rms_norm
from gapless.kernels.rope_triton import _rope_and_write

BUILDS = {
    "rms_norm": (
        _rms_norm,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"},
        {"WIDTH": 1024, "EARLY": False, "BLOCK": 1024},
        4,
    ),
    "add_rms_norm": (
        _add_rms_norm,
        {"x": "*bf16", "delta": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"},
        {"WIDTH": 8192, "BLOCK": 8192},
        16,
    ),
    "silu_mul": (_silu_mul, {"gate_up": "*bf16", "out": "*bf16"}, {"WIDTH": 3072, "BLOCK": 512}, 2),
    "rope_and_write": (
        _rope_and_write,
        {
            "qkv": "*bf16", "qk_norm": "*bf16", "eps": "fp32", "positions": "*i64", "table": "*fp32", "slots": "*i64",
            "cache": "*bf16", "layer": "i32",
        },
        {
            "MAX_LEN": 40960, "LAYERS": 28, "PAGE": 16, "TURNED": 24, "KV_HEADS": 8, "HALF": 64, "NORM": True,
            "EARLY": False, "HEADS": 4, "BLOCK": 64,
        },
        1,
    ),
}  # fmt: skip


def test_in_the_interpreter() -> None:
    interpreter.run("fused")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", BUILDS)
def test_compiled_ahead_of_time(name: str, capability: int) -> None:
    kernel, types, constants, warps = BUILDS[name]
    used = aot.build(kernel, capability, types, constants, warps=warps, stages=3, unaligned=("layer",))
    assert not used.trouble(capability)
    assert used.registers <= 64 and used.shared <= 1024
    assert ".v4.b32" in used.ptx, "16-bit values are loaded eight at a time"
