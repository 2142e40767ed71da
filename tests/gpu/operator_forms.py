"""Forms of operators of torch.library and of handed memory, each with whether the host waits in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("operator_forms", "DEF")


def _define(name: str, function: Callable[[Tensor], Tensor], key: str) -> Callable[[Tensor], Tensor]:
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, function, key)
    operator: Callable[[Tensor], Tensor] = getattr(torch.ops.operator_forms, name)
    return operator


_reads = _define("reads", lambda x: x * x.amax().item(), "CUDA")
_stays = _define("stays", lambda x: x * x.amax(), "CUDA")
_explicit = _define("explicit", lambda x: x[x > 0].clone(), "CompositeExplicitAutograd")
_implicit = _define("implicit", lambda x: x * float(x.sum()), "CompositeImplicitAutograd")


def forms() -> dict[str, tuple[bool, Callable[[], Any]]]:
    """Return the forms by name: whether one waits, and its call."""
    x = torch.ones(1024, device="cuda")
    counts = torch.ones(64, device="cuda", dtype=torch.int32)
    return {
        "an operator for CUDA that reads": (True, lambda: _reads(x)),
        "an operator for CUDA that stays on the device": (False, lambda: _stays(x)),
        "an operator for all devices that counts": (True, lambda: _explicit(x)),
        "an operator made of others that reads": (True, lambda: _implicit(x)),
        "a copy to meta": (False, lambda: x.to("meta")),
        "the same memory through dlpack": (False, lambda: torch.from_dlpack(x)),
        "a histogram of integers with its ends": (False, lambda: torch.histc(counts, 8, 0, 7)),
    }
