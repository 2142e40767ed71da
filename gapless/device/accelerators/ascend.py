"""The record of Huawei's NPUs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from gapless.device.accelerator import AcceleratorDevice


class AscendDevice(AcceleratorDevice):
    """An Ascend NPU, by torch_npu, which torch imports by an entry point of torch.backends. Never run.

    It has streams, events that can be asked, pinned memory and mem_get_info (torch_npu/csrc/core/npu/impl/
    NPUGuardImpl.cpp, NPUHooksInterface.cpp, torch_npu/npu/__init__.py). Operators go through a queue of the host's, and
    elapsedTime waits until it is empty, so fences have the host's times. NPUGraph is torch_npu's CUDAGraph; a record
    that overtakes the previous replay hangs the device (vllm-ascend 4233, 8354), and captures share about 1,800
    streams (vllm-ascend 8585, 9564), so nothing is captured.
    """

    kind = "ascend"
    torch_type = "npu"
    caps = AcceleratorDevice.caps._replace(
        rows=256, drafted_rows=32, step_tokens=4096,
        operations=1e12,  # an Ascend 310P at a fiftieth of its peak: operators are launched one by one
    )  # fmt: skip
    times = False
    missing: ClassVar[tuple[str, ...]] = (
        "Kernels are plain torch; torch_npu's fused attention takes lengths from the host and is not used.",
        "Nothing is captured: a record that overtakes a replay of an NPUGraph hangs the NPU, and captures are bounded.",
        "Steps have the times at which the host saw them end: elapsed_time waits for torch_npu's queue of operators.",
    )

    def memory(self) -> tuple[int, int]:
        free, total = self._module().mem_get_info(self.torch_device)
        return free, total

    def driver_calls(self, *kinds: str) -> int:
        stats = self._module().memory_stats_as_nested_dict(self.torch_device)
        return int(sum(stats.get(kind, 0) for kind in kinds))

    def _module(self) -> Any:
        return torch.get_device_module(self.torch_type)
