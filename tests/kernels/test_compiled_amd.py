"""The Triton kernels compiled for AMD's GPUs that are not here, from the source that NVIDIA's get: each fits."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
import test_compiled_codes as codes
import test_compiled_kernels as kernels
import test_compiled_layers as layers
from sharpest import sharpest

import gapless.kernels
from gapless.kernels import fp8_rows_triton, invariant_attention_triton, stream_triton
from gapless.kernels.arch import Arch
from gapless.kernels.quantised_triton import FP8, INT4, INT8, numbers_kernel

GPU = "gfx942"
NVIDIA_ONLY = {
    stream_triton.stream_kernel,  # for Hopper's large shared memory
    stream_triton.summed_norm_kernel,
    fp8_rows_triton.fp8_rows_kernel,  # for tensor cores that multiply e4m3
}
"""Kernels that `Arch` launches on no GPU of AMD"""
TAKES_64 = {"finish": 2}
"""Kernels whose warps follow from a warp's size, and by which number AMD's are fewer"""
IN_ONE_PROGRAM = "remember"
"""A kernel whose atomics order the threads of one program alone"""

COMBINED = {
    "HEADS": 16, "D": 128, "BLOCK_Q": 32, "LEAST": invariant_attention_triton.LEAST_IN_SEGMENT,
    "MOST": invariant_attention_triton.MOST_SEGMENTS, "REACH": 0, "SIZE": 0, "sinks": None,
}  # fmt: skip
NUMBERS = {"codes": "*u8", "scale": "*fp32", "zero": "*u8", "out": "*bf16"}
BUILDS = kernels.BUILDS | {
    "numbers E4M3": kernels.Build(numbers_kernel, {"K": 4096, "KIND": FP8, "GROUP": 128, "BLOCK": 2048}, 4, NUMBERS),
    "combined": kernels.Build(
        invariant_attention_triton.combine_kernel, COMBINED, 4,
        {"lens": "*i64", "out": "*bf16", "partial": "*fp32", "most": "i32"}, ("most",),
    ),
}  # fmt: skip
ONE_OF_EACH = {build.kernel: name for name, build in reversed(BUILDS.items())}
WHOLE, SPLIT = layers.PREFILL, layers.PREFILL._replace(split=True)
EIGHT_BITS, NIBBLES = ([one for one in layers.FEWER_BITS if one.kv == kv] for kv in ("fp8e4nv", "u8"))
ATTENTION = [
    layers.DECODE, WHOLE, layers.TURNS._replace(group=7), layers.LONG, SPLIT, layers.Attention("combine", 128),
    layers.Attention("combine_chunks", 128), layers.LONG._replace(group=4, kind=layers.EVERYTHING),
    WHOLE._replace(dim=256, kind=layers.GEMMA3), WHOLE._replace(group=4, kind=layers.EVERYTHING),
    *(one for one in EIGHT_BITS if not one.turn or one.many), NIBBLES[0], NIBBLES[-1],
]  # fmt: skip
PRODUCTS = [("qkv", 1), ("qkv", 16), ("gate_up", 32), ("down", 2), ("down", 16)]
CODED = [
    codes.Codes(FP8.value, 128, 1, 4096, 12288), codes.Codes(INT8.value, 0, 1, 4096, 12288),
    codes.Codes(INT4.value, 128, 1, 4096, 12288), codes.Codes(INT4.value, 128, 8, 4096, 12288),
    codes.Codes(INT8.value, 0, 32, 24576, 4096, True),
    codes.Codes(FP8.value, 0, 8, 4096, 12288), codes.Codes(FP8.value, 128, 256, 24576, 4096, True),
]  # fmt: skip


def build(case: Any, gpu: str) -> aot.Resources:
    if isinstance(case, str):
        own = BUILDS[case]
        return own._replace(warps=max(1, own.warps // TAKES_64.get(case.split()[0], 1))).compiled(gpu)
    if hasattr(case, "build"):
        return case.build(gpu)
    name, rows, *adapted = case
    return (layers.ADAPTED if adapted else layers.MATRICES)[name].build(rows, gpu)


CASES = [
    *((case, GPU) for case in ("finish 1024 1", ("down", 16), EIGHT_BITS[0], layers.InvariantProduct(1))),
    *((case, GPU) for case in ONE_OF_EACH.values() if case != "finish 64 1"),
    *((case, GPU) for case in (*PRODUCTS[:-1], ("qkv", 2, True), ("gate_up", 32, True), ("down", 2, True))),
    *((case, GPU) for case in (layers.InvariantProduct(2048), *layers.INVARIANT[2:])),
    *((case, GPU) for case in (*(one for one in ATTENTION if one != EIGHT_BITS[0]), *CODED)),
    *((case, "gfx950") for case in ("finish 1024 1", WHOLE, ("down", 32), EIGHT_BITS[0], CODED[3])),
    *((case, "gfx90a") for case in ("finish 256 1", layers.LONG, ("gate_up", 16), CODED[1], layers.INVARIANT[0])),
]


@pytest.mark.parametrize(("case", "gpu"), sharpest(CASES, 4, "aot"), ids=str)
def test_a_kernel_fits_an_amd_gpu_and_is_its_own(case: Any, gpu: str) -> None:
    used = build(case, gpu)
    prompts = isinstance(case, layers.Attention) and case.kernel == "prefill"
    assert used.trouble(gpu) == []
    assert case == IN_ONE_PROGRAM or aot.early_signals(used.code, str(case).startswith("finish")) == []
    assert not re.search(r"griddepcontrol|wgmma|cp\.async|prmt", used.code)
    if isinstance(case, (layers.InvariantProduct, layers.InvariantAttention)) or (prompts and not case.kv):
        assert "v_mfma_f32" in used.code


def test_every_kernel_is_compiled_for_amd_or_left_to_nvidia() -> None:
    found = set()
    for module in pkgutil.iter_modules(gapless.kernels.__path__):
        if module.name.endswith("_triton"):
            names = vars(importlib.import_module(f"gapless.kernels.{module.name}"))
            found |= {one for name, one in names.items() if name.endswith("_kernel")}
    built = set(ONE_OF_EACH) | {
        layers.matrix_kernel, layers.rows_in_turn_kernel, codes.quantised_kernel, codes.quantised_row_kernel,
        layers.invariant_linear_triton.product_kernel, invariant_attention_triton.attention_kernel,
        *(getattr(layers.attention_triton, f"{one.kernel}_kernel") for one in ATTENTION),
    }  # fmt: skip
    assert found == built | NVIDIA_ONLY


def test_few_rows_and_many_multiply_by_one_instruction_of_amd() -> None:
    found = [set(re.findall(r"v_mfma\w+", layers.InvariantProduct(rows).build(GPU).code)) for rows in (1, 2048)]
    assert found[0] == found[1] and len(found[0]) == 1


def test_launches_on_amd_take_no_option_of_nvidia() -> None:
    for gpu in aot.AMD.values():
        assert gpu.warp == 64 and gpu.registers(80) == {} and gpu.stages(8) == 2
        assert not (gpu.early or gpu.wgmma or gpu.has_e4m3)


def test_a_wait_for_the_previous_kernel_does_not_compile_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    own = BUILDS["rms_norm"]
    monkeypatch.setattr(Arch, "early", True)
    with pytest.raises(RuntimeError, match=r"PassManager|LLD"):
        own._replace(constants=own.constants | {"EARLY": True}).compiled(GPU)


def test_a_signal_is_noticed_when_it_does_not_wait_for_stores() -> None:
    code = build(("down", 16), GPU).code
    before = code[: code.index("buffer_wbl2")]
    waits = before.rindex("s_waitcnt vmcnt(0)")
    assert aot.early_signals(before[:waits] + code[waits + len("s_waitcnt vmcnt(0)") :])
