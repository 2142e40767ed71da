"""Compiles a Triton kernel for a GPU that is not here, and says what it takes of one. Needs no driver.

A GPU is a number, the compute capability of one of NVIDIA's, or AMD's name of one of its own.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest

from gapless.kernels.arch import Arch

triton = pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
compiler = pytest.importorskip("triton.compiler")
targets = pytest.importorskip("triton.backends.compiler")

SHARED_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Compute capability -> bytes of shared memory that one block may have."""
AMD = {
    "gfx942": Arch("amd", (9, 4), 304, 64 << 10),  # MI300X
    "gfx950": Arch("amd", (9, 5), 256, 160 << 10),
    "gfx90a": Arch("amd", (9, 0), 104, 64 << 10),
}
"""AMD's GPUs that are compiled for"""
GPUS = AMD | {
    capability: Arch("nvidia", divmod(capability, 10), 132, shared) for capability, shared in SHARED_LIMITS.items()
}
MAX_REGISTERS, MAX_VECTOR_REGISTERS = 255, 512
MOST_THREADS = 1024
"""Threads of a block"""
NOWHERE = "nowhere"
"""The device of launches that only compile: a real one finds nothing of theirs."""
ALIGNED = 16
"""The divisibility that Triton infers for a launch, and that pointers of torch's allocator have."""


def spread(capabilities: Iterable[int], *axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Return lines (a value of each axis, capability): for sm_90, where kernels are measured, all combinations.

    Every other GPU gets every value in as few combinations as that takes, each GPU in other ones: what a kernel takes
    differs by its shape and by the GPU, and compiling all shapes for all GPUs takes minutes.
    """
    found: list[tuple[Any, ...]] = []
    for at, capability in enumerate(capabilities):
        longest = max(map(len, axes))
        lists = [(list(axis) * longest)[at * place : at * place + longest] for place, axis in enumerate(axes)]
        cases = itertools.product(*axes) if capability == 90 else zip(*lists, strict=True)
        found += [(*case, capability) for case in cases]
    return found


class Resources(NamedTuple):
    """What one block (shared, bytes) and one thread (registers; stack and local in bytes) take."""

    registers: int
    stack: int
    local: int
    shared: int
    code: str
    """PTX, or AMD's assembly"""

    def trouble(self, gpu: int | str, spilled: int = 0) -> list[str]:
        """What does not fit, or spills more than `spilled` bytes."""
        found = []
        if self.registers > (MAX_VECTOR_REGISTERS if gpu in AMD else MAX_REGISTERS):
            found.append(f"{self.registers} registers")
        if self.stack > spilled or self.local:
            found.append(f"spills: {self.stack} bytes of stack, {self.local} of local memory")
        if self.shared > GPUS[gpu].shared_memory:
            found.append(f"{self.shared} bytes of shared memory, {gpu} has {GPUS[gpu].shared_memory}")
        return found + (amd_trouble(self.code) if gpu in AMD else [])


def amd_trouble(code: str) -> list[str]:
    """What makes an AMD GPU compute something else: float32 without subnormal numbers, which decode weights, or its own
    FP8."""
    found = ["subnormal numbers are zero"] if ".amdhsa_float_denorm_mode_32 3" not in code else []
    return found + sorted(set(re.findall(r"v_\w*(?:fp8|bf8)\w*", code)))


def early_signals(code: str, own: int = 0) -> list[str]:
    """Signals to other programs in a program of several warps on an AMD GPU that do not follow all of its stores: a
    wait of each thread for them, a barrier, and at most `own` stores of the thread that signals."""
    if ".max_flat_workgroup_size: 64" in code:
        return []
    found, stores, waited = [], own + 1, False
    for number, line in enumerate(code.splitlines(), 1):
        word = line.strip()
        if word.startswith("s_barrier") and waited:
            stores = 0
        elif re.match(r"(global|buffer|flat)_store", word):
            stores, waited = stores + 1, False
        elif word.startswith("s_waitcnt vmcnt(0)"):
            waited = True
        elif word.startswith("buffer_wbl2") and stores > own:
            found.append(f"line {number} signals before all threads have stored")
    return found


def build(
    kernel: Any, gpu: int | str, types: Mapping[str, str], constants: Mapping[str, Any], *, warps: int, stages: int,
    unaligned: Iterable[str] = (), registers: int | None = None,
) -> Resources:  # fmt: skip
    """Compile `kernel` (made by triton.jit, not interpreted) for a GPU.

    `types`: Triton's name of each parameter's type ("*bf16", "i32", "fp32"); `constants`: values of the constexpr ones.
    Pointers and integers count as divisible by 16, which is what a launch would infer, except those in `unaligned`.
    `registers`: most of a thread, the launch's `maxnreg`.
    """
    names = list(kernel.arg_names)
    assert set(names) == {*types, *constants}, set(names) ^ {*types, *constants}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    whole = [name for name, kind in types.items() if kind[0] in "*i" and name not in set(unaligned)]
    attrs = {(names.index(name),): [["tt.divisibility", ALIGNED]] for name in whole}
    source = compiler.ASTSource(kernel, signature, dict(constants), attrs)
    # Triton 3.9 warns when the default of the last option is relied on.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    assert warps * GPUS[gpu].warp <= MOST_THREADS
    with pytest.MonkeyPatch.context() as patch:
        use_driver(patch, gpu)  # kernels ask for its target
        if gpu in AMD:
            return _amd_resources(triton.compile(source, target=target_of(gpu), options=options))
        return _resources(triton.compile(source, target=target_of(gpu), options=options | {"maxnreg": registers}))


def target_of(gpu: int | str) -> Any:
    return targets.GPUTarget("hip" if gpu in AMD else "cuda", gpu, GPUS[gpu].warp)


def _amd_resources(compiled: Any) -> Resources:
    code = compiled.asm["amdgcn"]
    registers, scratch = (
        int(re.search(rf"^\s+\.{word}:\s+(\d+)", code, re.MULTILINE)[1])
        for word in ("vgpr_count", "private_segment_fixed_size")
    )
    assert compiled.asm["hsaco"].startswith(b"\x7fELF")
    return Resources(registers, scratch, 0, compiled.metadata.shared, code)


def _resources(compiled: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack, local = (int(re.search(rf"\b{word}:(\d+)", said)[1]) for word in ("REG", "STACK", "LOCAL"))
    return Resources(registers, stack, local, compiled.metadata.shared, compiled.asm["ptx"])


class Driver:
    """Stands in for CUDA's or ROCm's, for launches that end when the kernel is compiled."""

    def __init__(self, gpu: int | str) -> None:
        self.target = target_of(gpu)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return NOWHERE

    def get_current_stream(self, device: str) -> int:
        return 0


def use_driver(patch: pytest.MonkeyPatch, gpu: int | str) -> None:
    # Triton's own private name: its public reset_active() needs a GPU.
    patch.setattr(triton.runtime.driver, "_active", Driver(gpu))


@contextmanager
def launches_compile(gpu: int | str) -> Iterator[None]:
    """Inside, a launch binds its arguments (tensors of the CPU) and compiles as on a GPU, and runs nothing."""
    kind = triton.runtime.jit.JITFunction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__getitem__", lambda self, grid: partial(self.run, grid=grid, warmup=True))
        use_driver(patch, gpu)
        yield


def compiled(kernel: Any) -> int:
    """How many times launches have compiled it."""
    return len(kernel.device_caches[NOWHERE][0])
