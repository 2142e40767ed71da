"""The group of ranks that programs of a device use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gapless.base.errors import ConfigError
from gapless.comm.cuda import group_of_gpus
from gapless.comm.seam import Group
from gapless.comm.shared import Commons
from gapless.device import Caps, Device

_GROUPS: dict[str, Callable[[Any, Commons], Group]] = {
    "host": lambda device, commons: commons.group,
    "peers": group_of_gpus,
}
"""The group of each `Caps.sums`"""


def group_on(device: Device, commons: Commons) -> Group:
    """Return the group for this device's tensors. Every rank calls it, and on GPUs waits for the others.

    Raises:
        ConfigError: see `CudaGroup`, or the device has no group.
        EngineError: the ranks were stopped.
    """
    check_sums(device.kind, device.caps)
    return _GROUPS[device.caps.sums](device, commons)


def check_sums(kind: str, caps: Caps) -> None:
    """Raise ConfigError unless several ranks on devices of this kind can compute a step together."""
    if caps.sums not in _GROUPS or (caps.own_memory and caps.sums == "host"):
        raise ConfigError(
            f"tensor_parallel_size: {kind} has no sums over ranks (capability sums): leave it out, or use --device cpu"
        )
