"""Which kernels an engine uses."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from gapless.kernels import native, plain
from gapless.kernels.seam import Kernels


def choose(kind: str, dtype: torch.dtype = torch.float32) -> Kernels:
    """The best kernels for a model of `dtype` that work here on a device of this kind: cpu, cuda or sim."""
    if kind == "cpu" and dtype in native.DTYPES:
        return native.load() or plain.KERNELS
    if kind == "cuda" and find_spec("triton") is not None:
        from gapless.kernels import all_triton  # needs Triton, which comes with torch for CUDA

        return all_triton.HALF_KERNELS if dtype.itemsize == 2 else all_triton.KERNELS
    return plain.KERNELS
