"""Our operations in torch's library: dispatch modes see what each reads and writes, as of any operator of torch.

An argument of a kernel must not be called `params`: Triton 3.6 uses that name in the function that it writes around it.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

_LIBRARY = torch.library.Library("gapless", "FRAGMENT")
_KEY = "CPU" if triton.knobs.runtime.interpret else "CUDA"


def operator(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator gapless::`schema`, which runs `function` on CUDA, or on the CPU in Triton's interpreter."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, _KEY)
    overload: Callable[..., Any] = getattr(torch.ops.gapless, name).default
    return overload


def lanes(count: int) -> int:
    """Rows that a program looks at together, for a batch of `count`: few sizes, so that few variants are compiled."""
    return next((size for size in (64, 256) if count <= size), 1024)


def launch_options(early: bool) -> dict[str, bool]:
    """Of a kernel that may begin before the one in front of it has ended, and then waits itself: Hopper and later."""
    return {"launch_pdl": True} if early else {}
