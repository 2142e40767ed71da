"""Records of backends by their sources: capabilities, own spellings and gaps. None has run on its hardware."""

from __future__ import annotations

from gapless.device.accelerator import AcceleratorDevice
from gapless.device.accelerators.ascend import AscendDevice
from gapless.device.accelerators.gaudi import GaudiDevice
from gapless.device.accelerators.mps import MpsDevice
from gapless.device.accelerators.rocm import RocmDevice
from gapless.device.accelerators.xpu import XpuDevice

ACCELERATORS: dict[str, type[AcceleratorDevice]] = {
    record.kind: record for record in (RocmDevice, XpuDevice, AscendDevice, GaudiDevice, MpsDevice)
}
"""The records by the name that --device takes"""
