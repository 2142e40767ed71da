"""The group of ranks that programs of a device use."""

from __future__ import annotations

import logging
import mmap

import torch

from gapless.base.errors import ConfigError, EngineError
from gapless.comm.cuda import HANDLES_BYTES, CudaGroup, HostWords
from gapless.comm.seam import Group
from gapless.comm.shared import LINE_BYTES, STOP_AT, WAITED_AT, Commons
from gapless.device import CudaDevice, Device
from gapless.device.facts import mps_runs

log = logging.getLogger("gapless.comm")


def group_on(device: Device, commons: Commons) -> Group:
    """Return the group for this device's tensors. Every rank calls it, and on CUDA waits for the others.

    Raises:
        ConfigError: see `CudaGroup`, or the device has no group.
        EngineError: the ranks were stopped.
    """
    if not isinstance(device, CudaDevice):
        if device.caps.own_memory:
            raise ConfigError(
                f"tensor_parallel_size: a device of the kind {device.kind} has no sums over ranks: leave it out"
            )
        return commons.group
    share, at = commons.share, commons.board_at
    memory = mmap.mmap(commons.fd, -(-(at + share.world * LINE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE)
    pinned = device.host_memory(len(memory), torch.frombuffer(memory, dtype=torch.uint8))
    words = HostWords(pinned, STOP_AT, at + share.rank * LINE_BYTES + WAITED_AT, commons.group.stop)
    group = CudaGroup(share, device, words)
    # The host's group brings every rank's record to all.
    records = torch.zeros(share.world, HANDLES_BYTES, dtype=torch.uint8)
    records[share.rank] = torch.frombuffer(bytearray(group.handles()), dtype=torch.uint8)
    try:
        commons.group.add(records.view(torch.int64))
    except RuntimeError as error:
        raise EngineError(str(error)) from error
    group.connect([bytes(record.numpy()) for record in records])
    if share.leads and not group.apart and not mps_runs():
        log.warning(
            "device_ids: ranks share a GPU without NVIDIA's MPS, so they take turns, and each sum takes milliseconds: "
            "start nvidia-cuda-mps-control -d first, or name a GPU for each rank"
        )
    return group
