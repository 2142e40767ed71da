"""The record of Intel Gaudi."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, ClassVar

import torch

from gapless.base.errors import ConfigError
from gapless.device.accelerator import AcceleratorDevice

FACTORS, PRODUCT = (0xD2511F53, 0xCD9E8D57), 0xD2511F53 * 0xCD9E8D57 - (1 << 64)
"""Factors of random numbers, and their product as int64"""


class GaudiDevice(AcceleratorDevice):
    """An HPU, by habana_frameworks. Never run.

    torch imports it by an entry point of torch.backends in eager mode alone (habana_frameworks/autoload). In lazy mode
    operators wait for mark_step; it is no longer developed (docs.habana.ai, Theory of Operations), and refused. Facts
    of gaudi-pytorch-bridge (HPUEvent.cpp, HPUGuardImpl.h, synapse_helpers/device.cpp, scripts/env_flags.yaml): events
    of the default stream also cover copies, and the bridge orders copies and operators by their tensors, so that stream
    is the only one here; synchronizeDevice is not there for torch.accelerator; int64 may be int32.
    """

    kind = "gaudi"
    torch_type = "hpu"
    caps = AcceleratorDevice.caps._replace(
        rows=128, drafted_rows=16, step_tokens=4096,
        operations=1e12,  # a first Gaudi at a fiftieth of its peak: operators are launched one by one
    )  # fmt: skip
    one_queue = True
    times = False
    missing: ClassVar[tuple[str, ...]] = (
        "Kernels are plain torch in eager mode; lazy mode is refused, since its operators wait for mark_step.",
        "Nothing is captured: HPUGraph works in lazy mode alone.",
        "All work is in one queue: a copy of tokens waits for the step before it.",
        "A record waits until the bridge's threads on the host have launched all operators before it.",
        "A device that computes int64 as int32 is refused, as a first Gaudi is: random numbers would differ.",
    )

    @classmethod
    def prepare(cls) -> None:
        if importlib.util.find_spec("habana_frameworks") is not None:
            importlib.import_module("habana_frameworks.torch.core")
            if importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy():
                raise ConfigError("device: gaudi runs in eager mode (capability eager): set PT_HPU_LAZY_MODE=0")

    @classmethod
    def open(cls, threads: int) -> AcceleratorDevice:
        device = super().open(threads)
        numbers = torch.tensor(FACTORS, device=device.torch_device)
        if int(numbers[0] * numbers[1]) != PRODUCT:
            device.close()
            raise ConfigError(
                "device: this Gaudi computes int64 as int32 (capability int64): set PT_ENABLE_INT64_SUPPORT=1, "
                "which a first Gaudi does not have"
            )
        return device

    def synchronize(self) -> None:
        self._module().synchronize()

    def memory(self) -> tuple[int, int]:
        free, total = self._module().mem_get_info(self.torch_device)
        return free, total

    def driver_calls(self, *kinds: str) -> int:
        stats = self._module().memory_stats(self.torch_device)
        names = {"num_device_alloc": "TotalSystemAllocs", "num_device_free": "TotalSystemFrees"}
        return sum(int(stats[names[kind]]) for kind in kinds)

    def _module(self) -> Any:
        return torch.get_device_module(self.torch_type)
