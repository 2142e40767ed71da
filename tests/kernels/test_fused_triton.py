"""Norms, rotation and activation in Triton, without a GPU: in the interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import interpreter

from gapless.kernels.activation_triton import silu_mul_kernel
from gapless.kernels.norm_triton import add_rms_norm_kernel, rms_norm_kernel
from gapless.kernels.rope_triton import rope_and_write_kernel

ALONE = {"RANK": 0, "INNER_ROW": 0, "INNER_SLOT": 0, "inner": None, "adapters": None}
"""The constants of a kernel that adds nothing for adapters"""
BUILDS = {
    "rms_norm": (
        rms_norm_kernel,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"},
        {"WIDTH": 1024, "EARLY": False, "BLOCK": 1024},
        4,
    ),
    "add_rms_norm": (
        add_rms_norm_kernel,
        {"x": "*bf16", "delta": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"},
        {"WIDTH": 8192, "ROW": 8192, "BLOCK": 8192, **ALONE, "lines": None},
        16,
    ),
    "silu_mul": (
        silu_mul_kernel,
        {"gate_up": "*bf16", "out": "*bf16"},
        {"WIDTH": 3072, "ROW": 6144, "BLOCK": 512, "EARLY": False, **ALONE, "lines": None},
        2,
    ),
    "rope_and_write": (
        rope_and_write_kernel,
        {
            "qkv": "*bf16", "qk_norm": "*bf16", "eps": "fp32", "positions": "*i64", "table": "*fp32", "slots": "*i64",
            "cache": "*bf16", "layer": "i32",
        },
        {
            "ROW": 4096, "MAX_LEN": 40960, "LAYERS": 28, "PAGE": 16, "TURNED": 24, "KV_HEADS": 8, "HALF": 64,
            "NORM": True, "EARLY": False, "HEADS": 4, "BLOCK": 64, **ALONE, "up": None,
        },
        1,
    ),
}  # fmt: skip


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    interpreter.run("fused")


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", BUILDS)
def test_compiled_ahead_of_time(name: str, capability: int) -> None:
    kernel, types, constants, warps = BUILDS[name]
    used = aot.build(kernel, capability, types, constants, warps=warps, stages=3, unaligned=("layer",))
    assert not used.trouble(capability)
    assert used.registers <= 64 and used.shared <= 1024
    assert ".v4.b32" in used.ptx, "16-bit values are loaded eight at a time"


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("name", "warps"), [("silu_mul", 4), ("rope_and_write", 2)])
def test_with_adapters_compiled_ahead_of_time(name: str, warps: int, capability: int) -> None:
    kernel, types, constants, _ = BUILDS[name]
    table = "lines" if name == "silu_mul" else "up"
    types = types | {"inner": "*fp32", "adapters": "*i64", table: "*bf16"}
    constants = {key: value for key, value in constants.items() if key not in types} | {"RANK": 16, "EARLY": True}
    constants |= {"INNER_ROW": 48}
    used = aot.build(kernel, capability, types, constants, warps=warps, stages=3, unaligned=("layer",))
    assert not used.trouble(capability)
    before = used.ptx[: used.ptx.index("griddepcontrol.wait")]
    assert before.count("ld.global") > 32, "adapters are asked for before the kernel in front has ended"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("name", "warps"), [("silu_mul", 4), ("rope_and_write", 2), ("add_rms_norm", 16)])
def test_after_a_joined_product_compiled_ahead_of_time(name: str, warps: int, capability: int) -> None:
    kernel, types, constants, _ = BUILDS[name]
    types = types | {"inner": "*bf16", "adapters": "*i64", "up" if name == "rope_and_write" else "lines": "*bf16"}
    constants = {key: value for key, value in constants.items() if key not in types} | {"RANK": 16}
    constants |= {"ROW": constants["ROW"] + 5 * 48, "INNER_ROW": constants["ROW"] + 5 * 48, "INNER_SLOT": 48}
    used = aot.build(kernel, capability, types, constants, warps=warps, stages=3, unaligned=("layer",))
    assert not used.trouble(capability)
