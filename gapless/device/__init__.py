"""The only room that touches streams, events, pinned memory, synchronisation and threads for device work."""

from __future__ import annotations

import torch

from gapless.base.errors import ConfigError
from gapless.device.cpu import CpuDevice
from gapless.device.cuda import CudaDevice
from gapless.device.ring import Fence, Ring, RingSlot
from gapless.device.seam import Caps, Device, Graph, Program, Stream

__all__ = [
    "Caps",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Fence",
    "Graph",
    "Program",
    "Ring",
    "RingSlot",
    "Stream",
    "gpus",
    "kind_of",
    "open_device",
]


def open_device(name: str = "auto", threads: int = 0) -> Device:
    """Open auto, cpu or cuda; auto takes CUDA when torch sees one. The caller closes it.

    `threads` is for cpu: torch threads of the compute stream, 0 for most usable cores.

    Raises:
        ConfigError: an unknown name, or CUDA where there is none.
    """
    name = kind_of(name)
    if name == "cpu":
        return CpuDevice(threads)
    if name != "cuda":
        raise ConfigError(f"device must be one of auto, cpu, cuda, got {name!r}")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda but torch sees no CUDA device: use --device cpu, or a torch built for CUDA")
    return CudaDevice()


def kind_of(name: str) -> str:
    """Return what auto takes here; of another name, that."""
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def gpus() -> list[tuple[str, int]]:
    """Name and total bytes of every CUDA device that torch sees; for people to read."""
    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(facts.name, facts.total_memory) for facts in every]
