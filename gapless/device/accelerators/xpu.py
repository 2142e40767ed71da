"""The record of Intel's GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from gapless.base.errors import ConfigError
from gapless.device.accelerator import AcceleratorDevice

# torch.xpu is typed only in part, and differently from version to version.
torch_xpu: Any = torch.xpu

EARLY_EVENTS = "Data Center GPU Max"
"""Name of GPUs whose events may pass before a copy to the host has ended"""


class XpuDevice(AcceleratorDevice):
    """An Intel GPU. Never run.

    Streams are SYCL queues, 32 of a priority in turn (c10/xpu/XPUStream.h). A graph is a recorded queue: XPUGraph, from
    torch 2.12, has no capture_error_mode (torch/xpu/graphs.py, ATen/xpu/XPUGraph.cpp). To wait for another queue while
    one is recorded is refused (vllm 53993, pytorch 196490); our programs do not wait, and copy on their own stream.
    Intel's Triton asks for a driver before it compiles anything, so its kernels are not compiled ahead of time.
    """

    kind = "xpu"
    torch_type = "xpu"
    caps = AcceleratorDevice.caps._replace(
        captures=hasattr(torch_xpu, "XPUGraph"), pads=hasattr(torch_xpu, "XPUGraph"),
        rows=128, drafted_rows=16, step_tokens=4096, operations=1e11,  # an integrated GPU at a tenth of its peak
    )  # fmt: skip
    missing: ClassVar[tuple[str, ...]] = (
        "Kernels are plain torch: Intel's Triton cannot compile ours without a GPU, so none has been shown to fit.",
        "Graphs need torch 2.12; before, each operator is launched.",
        f"{EARLY_EVENTS} is refused: an event may pass before a copy to the host has ended (torch-xpu-ops 4349).",
    )

    @classmethod
    def prepare(cls) -> None:
        if torch_xpu.is_available() and EARLY_EVENTS in torch_xpu.get_device_name():
            raise ConfigError(
                f"device: on {EARLY_EVENTS}, events may pass before copies to the host have ended "
                "(capability ordered copies): use --device cpu"
            )

    def new_graph(self) -> tuple[Any, Callable[[], None]]:
        raw = torch_xpu.XPUGraph()
        self._pool = self._pool or torch_xpu.graph_pool_handle()
        return raw, partial(raw.capture_begin, pool=self._pool)
