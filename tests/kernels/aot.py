"""Compiles a Triton kernel for a GPU that is not here, and says what it takes of one. Needs no driver."""

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

triton = pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
compiler = pytest.importorskip("triton.compiler")
targets = pytest.importorskip("triton.backends.compiler")

SHARED_LIMITS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Compute capability -> bytes of shared memory that one block may have."""
MAX_REGISTERS = 255
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
    ptx: str

    def trouble(self, capability: int, spilled: int = 0) -> list[str]:
        """What does not fit, or spills more than `spilled` bytes."""
        found = []
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers")
        if self.stack > spilled or self.local:
            found.append(f"spills: {self.stack} bytes of stack, {self.local} of local memory")
        if self.shared > SHARED_LIMITS[capability]:
            found.append(f"{self.shared} bytes of shared memory, sm_{capability} has {SHARED_LIMITS[capability]}")
        return found


def build(
    kernel: Any, capability: int, types: Mapping[str, str], constants: Mapping[str, Any], *, warps: int, stages: int,
    unaligned: Iterable[str] = (), registers: int | None = None,
) -> Resources:  # fmt: skip
    """Compile `kernel` (made by triton.jit, not interpreted) for sm_`capability`.

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
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, "maxnreg": registers}
    target = targets.GPUTarget("cuda", capability, 32)
    return _resources(triton.compile(source, target=target, options=options))


def _resources(compiled: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack, local = (int(re.search(rf"\b{word}:(\d+)", said)[1]) for word in ("REG", "STACK", "LOCAL"))
    return Resources(registers, stack, local, compiled.metadata.shared, compiled.asm["ptx"])


class Driver:
    """Stands in for CUDA's, for launches that end when the kernel is compiled."""

    def __init__(self, capability: int) -> None:
        self.target = targets.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return NOWHERE

    def get_current_stream(self, device: str) -> int:
        return 0


def use_driver(patch: pytest.MonkeyPatch, capability: int) -> None:
    # Triton's own private name: its public reset_active() needs a GPU.
    patch.setattr(triton.runtime.driver, "_active", Driver(capability))


@contextmanager
def launches_compile(capability: int) -> Iterator[None]:
    """Inside, a launch binds its arguments (tensors of the CPU) and compiles as on a GPU, and runs nothing."""
    kind = triton.runtime.jit.JITFunction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__getitem__", lambda self, grid: partial(self.run, grid=grid, warmup=True))
        use_driver(patch, capability)
        yield


def compiled(kernel: Any) -> int:
    """How many times launches have compiled it."""
    return len(kernel.device_caches[NOWHERE][0])
