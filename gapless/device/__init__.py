"""The only room that touches streams, events, pinned memory, synchronisation and threads for device work."""

from __future__ import annotations

import torch

from gapless.base.errors import ConfigError
from gapless.device import host
from gapless.device.cpu import CpuDevice
from gapless.device.cuda import CudaDevice
from gapless.device.ring import Ring, Slot
from gapless.device.seam import Device, Fence, Program, Stream
from gapless.device.sim import SimDevice

__all__ = [
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Fence",
    "Program",
    "Ring",
    "SimDevice",
    "Slot",
    "Stream",
    "available",
    "open_device",
]


def open_device(name: str = "auto", threads: int = 0, seed: int = 0) -> Device:
    """Open auto, cpu, cuda or sim; auto takes CUDA when torch sees one. The caller closes it.

    `threads` is for cpu: torch threads of the compute stream, 0 for all usable cores. `seed` is for sim.

    Raises:
        ConfigError: an unknown name, or CUDA where there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(threads)
    if name == "sim":
        return SimDevice(seed)
    if name != "cuda":
        raise ConfigError(f"device must be one of auto, cpu, cuda, sim, got {name!r}")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda but torch sees no CUDA device: use --device cpu, or a torch built for CUDA")
    return CudaDevice()


def available() -> dict[str, str]:
    """The real devices of this machine and a few words about each, for people to read."""
    free, total = host.memory()
    found = {"cpu": f"{host.usable_cores()} cores, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["cuda"] = f"{torch.cuda.get_device_name()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    return found


def describe_cuda() -> list[str]:
    """The CUDA devices that torch sees, one line each: name, memory, CUDA version. Empty where there is none."""
    if not torch.cuda.is_available():
        return []
    facts = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{one.name}, {one.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}" for one in facts]
