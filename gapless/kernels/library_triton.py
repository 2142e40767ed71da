"""Registers operations in torch's library: dispatch modes see the reads and writes of each, as of torch's own.

An argument of a kernel must not be called `params`: Triton 3.6 uses that name in the function that it writes around it.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from gapless.device import facts
from gapless.kernels.arch import INTERPRETER, Arch, arch_of

_LIBRARY = torch.library.Library("gapless", "FRAGMENT")


_TYPES = {
    "Tensor | None": "Tensor?",
    "list[int]": "int[]",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor)",
    "None": "()",
}
"""Python annotations, and the types of a schema with another spelling"""


def operator(function: Callable[..., Any], *writes: str) -> Callable[..., Any]:
    """Make the operator gapless::triton_<the function's name>, on any device: in Triton's interpreter on the CPU.

    Its schema follows from the annotations. The function writes only to the named tensors. Keyword-only parameters are
    for measuring, and not in the operator.
    """
    name, signature = f"triton_{function.__name__.lstrip('_')}", inspect.signature(function)
    assert signature.parameters.keys() >= {*writes}, f"{name} has no parameter for all of {writes}"
    arguments = []
    for place, (argument, how) in enumerate(signature.parameters.items()):
        if how.kind is how.KEYWORD_ONLY:
            break
        kind = f"Tensor(a{place}!)" if argument in writes else _TYPES.get(how.annotation, how.annotation)
        arguments.append(f"{kind} {argument}" + ("" if how.default is how.empty else f"={how.default}"))
    returned = signature.return_annotation
    _LIBRARY.define(f"{name}({', '.join(arguments)}) -> {_TYPES.get(returned, returned)}")
    _LIBRARY.impl(name, function, facts.ANY_KEY)
    overload: Callable[..., Any] = getattr(torch.ops.gapless, name).default
    return overload


def lanes(count: int) -> int:
    """Return the rows of a program, for a batch of `count`: few sizes, so that few variants are compiled."""
    return next((size for size in (64, 256) if count <= size), 1024)


@functools.cache
def arch(device: torch.device) -> Arch:
    """Return the GPU that kernels are launched on."""
    return INTERPRETER if triton.knobs.runtime.interpret else arch_of(device)


def launch_options(early: bool) -> dict[str, bool]:
    """Return the options of a kernel that begins early: see `Arch.early`.

    Its first work overlaps the end of the previous kernel, for whose results it waits (`gdc_wait`). All its programs
    wait, so that a kernel that waits for it waits for everything before it.
    """
    return {"launch_pdl": True} if early else {}


@functools.cache
def counters(device: torch.device, count: int) -> Tensor:
    """Return int32 zeros: the ended programs of each shared result. Kernels leave zeros, and share a stream.

    First needed by an eager launch: a graph's pool would give it memory reused between replays.
    """
    assert triton.knobs.runtime.interpret or not facts.capturing(), "launched eagerly before it is captured"
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def all_stored():
    """Wait until every thread of a program has stored, before a single thread signals it to other programs.

    On NVIDIA's GPUs a barrier does it. On AMD's, each thread waits for its stores first: the barrier alone orders them
    in the program, and the signal's write-back waits for the stores of its own thread."""
    if is_hip():
        # It counts loads and stores on CDNA alone.
        asm: tl.constexpr = "s_waitcnt vmcnt(0)\n v_mov_b32 $0, $1"
        tl.inline_asm_elementwise(asm, "=v,v", [tl.arange(0, 1)], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def prefetch(place):
    """Request the lines of memory at `place`, a tensor of pointers, into the second-level cache."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
