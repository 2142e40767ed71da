"""The only room that touches streams, events, pinned memory, synchronisation and threads for device work."""

from __future__ import annotations

from contextlib import suppress

import torch

from gapless.base.config import DEVICE_PLUG_INS, DEVICES, GENERAL
from gapless.base.errors import ConfigError
from gapless.base.plug_ins import check_name, load, plug_ins
from gapless.device.accelerator import AcceleratorDevice
from gapless.device.accelerator_stream import torch_accelerator
from gapless.device.accelerators import ACCELERATORS
from gapless.device.cpu import CpuDevice
from gapless.device.cuda import CudaDevice
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
    "classes_here",
    "device_class",
    "gpus",
    "open_device",
    "reaches",
    "seen_class",
]


def device_class(name: str) -> type[Device]:
    """Return the class of the device with this name: auto, cpu, cuda, a record's or torch's name for its type,
    accelerator:TYPE (TYPE as torch names it), or a plug-in's. auto takes the accelerator that torch sees, else the CPU;
    accelerator:cuda is the general class, other types have their record's, if there is one.

    Raises:
        ConfigError: the name is unknown, or its package cannot be imported.
    """
    if name.startswith(GENERAL):
        return _class_of(_known_type(name.removeprefix(GENERAL)))
    check_name("device", name, DEVICES, DEVICE_PLUG_INS)
    if name == "auto":
        return seen_class() or CpuDevice
    own: dict[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice, **ACCELERATORS}
    return own.get(name) or _record_of(name) or load(DEVICE_PLUG_INS, name, "device")


def seen_class() -> type[AcceleratorDevice] | None:
    """Return the class of the accelerator that torch sees: its record, a plug-in's of its name, else the general class;
    None if it sees none."""
    seen = torch_accelerator.current_accelerator(check_available=True)
    if seen is None:
        return None
    if seen.type == CudaDevice.torch_type and not torch.version.hip:
        return CudaDevice
    if seen.type in plug_ins(DEVICE_PLUG_INS) and not _record_of(seen.type):
        found: type[AcceleratorDevice] = load(DEVICE_PLUG_INS, seen.type, "device")
        return found
    return _class_of(seen.type)


def classes_here(asked: str = "auto") -> dict[str, type[Device]]:
    """Return the classes of the CPU, of the accelerator that torch sees, and of the name `asked`, by their names; of
    two of one kind the latter. Raises as `device_class`."""
    by_kind = {found.kind: (name, found) for name in ("cpu", "auto", asked) for found in (device_class(name),)}
    return dict(by_kind.values())


def _class_of(torch_type: str) -> type[AcceleratorDevice]:
    """Return the record of a type of torch's, which has refusals of its own, else the general class."""
    has_record = torch_type != CudaDevice.torch_type or torch.version.hip
    return (_record_of(torch_type) if has_record else None) or AcceleratorDevice.of(torch_type)


def _record_of(torch_type: str) -> type[AcceleratorDevice] | None:
    return next((record for record in ACCELERATORS.values() if record.torch_type == torch_type), None)


def _known_type(torch_type: str) -> str:
    """Return a type of torch's. Raises ConfigError for another name."""
    if _record_of(torch_type):
        return torch_type
    with suppress(RuntimeError):
        if torch.device(torch_type).type == torch_type != CpuDevice.kind:
            return torch_type
    mend = f"use --device {torch_type}" if torch_type in (CpuDevice.kind, *plug_ins(DEVICE_PLUG_INS)) else ""
    raise ConfigError(
        f"device: torch has no accelerator of the type {torch_type!r}: "
        f"{mend or 'give accelerator:TYPE one of its own, such as accelerator:xpu'}"
    )


def open_device(name: str = "auto", threads: int = 0, number: int = 0) -> Device:
    """Open the device of this name, of several GPUs the one with this number; the caller closes it.

    Raises as `device_class` and `Device.open`.
    """
    found = device_class(name)
    if number and issubclass(found, AcceleratorDevice):
        found.prepare()
        if number >= (count := torch_accelerator.device_count()):
            raise ConfigError(f"device_ids: there is no {found.kind} device {number}, torch sees {count}")
        found.make_current(torch.device(found.torch_type, number))
    return found.open(threads)


def gpus() -> list[tuple[str, int]]:
    """Name and total bytes of every accelerator that torch sees, 0 if its backend does not give them; for people to
    read."""
    found = seen_class()
    if found is None:
        return []
    read = getattr(torch.get_device_module(found.torch_type), "get_device_properties", lambda number: None)
    every = [read(number) for number in range(torch_accelerator.device_count())]
    return [(getattr(facts, "name", found.kind), getattr(facts, "total_memory", 0)) for facts in every]


def reaches(one: int, other: int) -> bool:
    """Return whether kernels of a CUDA device can use the memory of another; for people to read."""
    return torch.cuda.can_device_access_peer(one, other)
