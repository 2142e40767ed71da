"""Default dtype of a CPU."""

from __future__ import annotations

import math
from time import perf_counter

import torch

from gapless.kernels import native
from gapless.kernels.linear import TorchLinear

DTYPE_ROWS = (1, 128)
SIZE, TURNS = 1024, 3
CLEAR_GAIN = 1.5
"""float32 is chosen if the checkpoint's dtype takes this many times as long: it needs twice the memory, and a busy
moment must not change a model's results."""


def float32_gains(dtype: torch.dtype) -> float:
    """Return float32's speed on this CPU as a multiple of `dtype`'s, for one row and for prompts alike.

    Our own products widen their inputs to float32, so half as many bytes are never slower: 1, not measured. torch's
    products, used without a compiler, are measured: its bfloat16 is emulated on many processors.
    """
    if dtype == torch.float32 or native.load() is not None:
        return 1.0
    own, wide = ([product_seconds(kind, rows) for rows in DTYPE_ROWS] for kind in (dtype, torch.float32))
    return math.sqrt(math.prod(a / b for a, b in zip(own, wide, strict=True)))


def product_seconds(dtype: torch.dtype, rows: int) -> float:
    """Return the least time of a few products, the first left out."""
    layer = TorchLinear(torch.ones(SIZE, SIZE, dtype=dtype))
    x, times = torch.ones(rows, SIZE, dtype=dtype), []
    for _ in range(1 + TURNS):
        start = perf_counter()
        layer(x)
        times.append(perf_counter() - start)
    return min(times[1:])
