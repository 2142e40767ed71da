"""The only room that touches streams, events, pinned memory, synchronisation and threads for device work."""

from __future__ import annotations

import torch

from gapless.base.config import DEVICE_PLUG_INS, DEVICES, GENERAL
from gapless.base.errors import ConfigError
from gapless.base.plug_ins import check_name, load
from gapless.device.accelerator import AcceleratorDevice
from gapless.device.cpu import CpuDevice
from gapless.device.cuda import CudaDevice
from gapless.device.facts import make_current
from gapless.device.ring import Fence, Ring, RingSlot
from gapless.device.seam import Caps, Device, Graph, Program, Stream

__all__ = [
    "AcceleratorDevice",
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
    "device_class",
    "gpus",
    "open_device",
    "reaches",
]


def device_class(name: str) -> type[Device]:
    """Return the class of auto, cpu, cuda, accelerator:TYPE (TYPE as torch names it) or a plug-in's device; auto takes
    CUDA if torch sees a device.

    Raises:
        ConfigError: the name is unknown, or its package cannot be imported.
    """
    if name.startswith(GENERAL):
        return AcceleratorDevice.of(name.removeprefix(GENERAL))
    own: dict[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}
    check_name("device", name, DEVICES, DEVICE_PLUG_INS)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return own.get(name) or load(DEVICE_PLUG_INS, name, "device")


def open_device(name: str = "auto", threads: int = 0, number: int = 0) -> Device:
    """Open the device of this name, of several GPUs the one with this number; the caller closes it.

    Raises as `device_class` and `Device.open`.
    """
    found = device_class(name)
    if number and found is CudaDevice:
        if number >= len(gpus()):
            raise ConfigError(f"device_ids: there is no CUDA device {number}, torch sees {len(gpus())}")
        make_current(number)
    return found.open(threads)


def gpus() -> list[tuple[str, int]]:
    """Name and total bytes of every CUDA device that torch sees; for people to read."""
    if not torch.cuda.is_available():
        return []
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(facts.name, facts.total_memory) for facts in every]


def reaches(one: int, other: int) -> bool:
    """Return whether kernels of a CUDA device can use the memory of another; for people to read."""
    return torch.cuda.can_device_access_peer(one, other)
