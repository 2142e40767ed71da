"""The record of AMD's GPUs."""

from __future__ import annotations

from typing import ClassVar

import torch

from gapless.base.errors import ConfigError
from gapless.device.cuda import CudaDevice
from gapless.device.facts import compiled_for


class RocmDevice(CudaDevice):
    """An AMD GPU. Never run.

    torch for ROCm spells everything as for CUDA: the type cuda, torch.cuda, CUDAGraph, cudaHostRegister. Only
    torch.version.hip differs (torch's notes/hip.html; HIPGuardImplMasqueradingAsCUDA.h has all of events). CUDA's
    runtime is not loaded, so uploads and replays go through torch.
    """

    kind = "rocm"
    caps = CudaDevice.caps._replace(
        polled=False,  # whether registered memory is coherent during a kernel is not verified
        launch_queue=0,
    )
    has_run = False
    missing: ClassVar[tuple[str, ...]] = (
        "Triton kernels are compiled for gfx90a, gfx942 and gfx950, and none has been started on a GPU.",
        "FP8 of MI300 (gfx942) is fnuz, not the e4m3fn of checkpoints: weights and KV in FP8 are decoded by whole "
        "numbers, and inputs stay in 16 bits.",
        "On other GPUs of AMD kernels are plain torch.",
        "Whether host threads may poll registered memory during a step is not verified: they wait for fences.",
    )

    @classmethod
    def open(cls, threads: int) -> RocmDevice:
        if not torch.version.hip:
            raise ConfigError("device is rocm but torch is not built for ROCm: install torch's wheel for ROCm")
        if not torch.cuda.is_available():
            raise ConfigError("device is rocm but torch sees no AMD GPU: use --device cpu")
        device = cls()
        if not compiled_for(device.torch_device):
            device.caps = cls.caps._replace(kernels="torch")
        return device
