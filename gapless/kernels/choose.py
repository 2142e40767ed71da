"""Chooses the kernels of an engine."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from gapless.base.errors import ConfigError
from gapless.device import build
from gapless.kernels import native, plain
from gapless.kernels.seam import Kernels


def choose(kernels: str, dtype: torch.dtype = torch.float32, batch_invariant: bool = False) -> Kernels:
    """Return the best kernels for a model of `dtype` that work here on a device with these `Caps.kernels`.

    batch_invariant: kernels whose rows do not depend on their batch, to the bit.

    Raises:
        ConfigError: there are no such kernels here.
    """
    if batch_invariant:
        return _invariant(kernels)
    if kernels == "native" and dtype in native.NATIVE_DTYPES:
        return native.load() or plain.KERNELS
    if kernels == "triton" and find_spec("triton") is not None:
        from gapless.kernels import all_triton  # needs Triton, which comes with torch for CUDA and for ROCm

        return all_triton.HALF_KERNELS if dtype.itemsize == 2 else all_triton.TRITON_KERNELS
    return plain.KERNELS


def _invariant(kernels: str) -> Kernels:
    if kernels == "triton":
        if find_spec("triton") is None:
            raise ConfigError("batch_invariant on a GPU needs Triton: install it, or turn the flag off")
        from gapless.kernels import all_triton

        return all_triton.INVARIANT_KERNELS
    if kernels == "torch":
        raise ConfigError(
            "batch_invariant needs a device with Triton or C++ kernels (capability kernels), and this one has torch's: "
            "use --device cpu, or turn the flag off"
        )
    own = native.load()
    if own is None:
        reason = build.outcomes[native.NAME].reason
        raise ConfigError(f"batch_invariant on a CPU needs the C++ kernels, which are not here: {reason}")
    return native.invariant(own)
