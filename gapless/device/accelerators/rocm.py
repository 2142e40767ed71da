"""The record of AMD's GPUs."""

from __future__ import annotations

from typing import ClassVar

import torch

from gapless.base.errors import ConfigError
from gapless.device import facts
from gapless.device.cuda import CudaDevice
from gapless.device.probe import admit


class RocmDevice(CudaDevice):
    """An AMD GPU. Never run.

    torch for ROCm spells everything as for CUDA: the type cuda, torch.cuda, CUDAGraph, cudaHostRegister. Only
    torch.version.hip differs (torch's notes/hip.html; HIPGuardImplMasqueradingAsCUDA.h has all of events). CUDA's
    runtime is not loaded, so uploads and replays go through torch. Triton orders a block's stores by counters of CDNA;
    other GPUs run plain torch.
    """

    kind = "rocm"
    caps = CudaDevice.caps._replace(
        sums="none",
        polled=False,  # whether registered memory is coherent during a kernel is not verified
        launch_queue=0,
    )
    has_run = False
    missing: ClassVar[tuple[str, ...]] = (
        "Triton kernels are compiled for gfx90a, gfx942 and gfx950, and none has been started on a GPU.",
        "Kernels are plain torch on other AMD GPUs, such as RDNA.",
        "FP8 of MI300 (gfx942) is fnuz, not the e4m3fn of checkpoints: weights and KV in FP8 are decoded by whole "
        "numbers, and inputs stay in 16 bits.",
        "Several ranks are refused: their sums are kernels of CUDA.",
        "Whether host threads may poll registered memory during a step is not verified: they wait for fences.",
    )

    def __init__(self) -> None:
        super().__init__()
        if not facts.compiled_for(self.torch_device):
            self.caps = self.caps._replace(kernels="torch")

    @classmethod
    def open(cls, threads: int) -> RocmDevice:
        if not torch.version.hip:
            raise ConfigError("device is rocm but torch is not built for ROCm: install torch's wheel for ROCm")
        if not torch.cuda.is_available():
            raise ConfigError("device is rocm but torch sees no AMD GPU: use --device cpu")
        admit(cls, cls.current())
        return cls()
