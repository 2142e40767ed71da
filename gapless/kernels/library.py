"""Our operations in torch's library: dispatch modes see what each reads and writes, as of any operator of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("gapless", "FRAGMENT")


def operator(schema: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator gapless::`schema`, which runs `function` when a tensor of its arguments lies on CUDA."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CUDA")
    overload: Callable[..., Any] = getattr(torch.ops.gapless, name).default
    return overload
