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

from gapless.device import facts

_LIBRARY = torch.library.Library("gapless", "FRAGMENT")
DISPATCH_KEY = "CPU" if triton.knobs.runtime.interpret else "CUDA"


_TYPES = {
    "Tensor | None": "Tensor?",
    "list[int]": "int[]",
    "tuple[Tensor, Tensor]": "(Tensor, Tensor)",
    "tuple[Tensor, Tensor, Tensor]": "(Tensor, Tensor, Tensor)",
    "None": "()",
}
"""Python annotations, and the types of a schema with another spelling"""


def operator(function: Callable[..., Any], *writes: str) -> Callable[..., Any]:
    """Make the operator gapless::triton_<the function's name>, for CUDA, or for the CPU in Triton's interpreter.

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
    _LIBRARY.impl(name, function, DISPATCH_KEY)
    overload: Callable[..., Any] = getattr(torch.ops.gapless, name).default
    return overload


def lanes(count: int) -> int:
    """Return the rows of a program, for a batch of `count`: few sizes, so that few variants are compiled."""
    return next((size for size in (64, 256) if count <= size), 1024)


LARGE_BLOCK = 160 << 10


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device is a GPU of compute capability 9.0 or later."""
    return not triton.knobs.runtime.interpret and facts.capability(device) >= (9, 0)


@functools.cache
def has_warpgroups(device: torch.device) -> bool:
    """Return whether four warps multiply together: data center GPUs from Hopper on, compute capability 9 to 11."""
    return not triton.knobs.runtime.interpret and (9, 0) <= facts.capability(device) < (12, 0)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether the device has compute capability 9.x: a block may have 227 KiB of shared memory, and tensor cores
    multiply from there. Later tensor cores take at most 512 of a product's depth at once."""
    return not triton.knobs.runtime.interpret and facts.capability(device)[0] == 9


@functools.cache
def has_large_blocks(device: torch.device) -> bool:
    """Return whether a block may have the shared memory of data center GPUs, 163 KiB or more; others have 99."""
    return triton.knobs.runtime.interpret or facts.shared_memory(device) >= LARGE_BLOCK


def launch_options(early: bool) -> dict[str, bool]:
    """Return the options of a kernel that begins early: programmatic dependent launch, on Hopper and later.

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
def prefetch(place):
    """Request the lines of memory at `place`, a tensor of pointers, into the second-level cache."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
