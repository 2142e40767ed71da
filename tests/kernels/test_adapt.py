"""Adapters: in torch, in Triton's interpreter, and compiled for three GPUs."""

from __future__ import annotations

import pytest
import torch
from adapt_cases import check_adapt, check_alone
from kernels.native_kernels import load_native

from gapless.kernels import native, plain

COUNTS = {"tokens": "i32", "used": "i32"}
ENDS = {"first": "i32", "second": "i32", "last": "i32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 3), (200, 8)])
def test_it_adds_what_the_definition_says(tokens, slots, dtype):
    for seed in range(2):
        check_adapt(plain.KERNELS, dtype, "cpu", tokens, slots, seed)


def test_a_token_is_alone():
    check_alone(plain.KERNELS, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", native.NATIVE_DTYPES)
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (5, 3), (200, 8)])
def test_native_code_adds_what_the_definition_says(tokens, slots, dtype):
    kernels = load_native()
    for seed in range(2):
        check_adapt(kernels, dtype, "cpu", tokens, slots, seed)
    check_alone(kernels, dtype, "cpu")


def test_kernels_pass_their_tests_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
    import interpreter

    interpreter.run("adapt")


@pytest.mark.parametrize(
    ("dtype", "high", "capability"),
    [
        ("*bf16", 16, 90),
        *((dtype, high, gpu) for dtype, high in (("*fp32", 16), ("*bf16", 64)) for gpu in (80, 90, 100)),
    ],
)
def test_it_compiles_ahead_of_time(dtype: str, high: int, capability: int) -> None:
    pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
    import aot

    from gapless.kernels.adapt_triton import BLOCK_K, BLOCK_N, down_kernel, up_kernel

    down = {"x": dtype, "down": dtype, "slots": "*i64", "parts": "*fp32", **COUNTS}
    sizes = {"K": 4096, "WIDTH": 48, "RANK": 16, "DEPTH": 256, "BLOCK_T": high, "BLOCK_K": BLOCK_K}
    found = [aot.build(down_kernel, capability, down, sizes, warps=4, stages=3, unaligned=COUNTS)]
    up = {"y": dtype, "up": dtype, "slots": "*i64", "parts": "*fp32", **COUNTS, **ENDS}
    sizes = {"N": 6144, "WIDTH": 48, "RANK": 16, "SHARES": 16, "BLOCK_T": high, "BLOCK_N": BLOCK_N}
    found.append(aot.build(up_kernel, capability, up, sizes, warps=4, stages=2, unaligned=COUNTS))
    assert not [trouble for used in found for trouble in used.trouble(capability)]
