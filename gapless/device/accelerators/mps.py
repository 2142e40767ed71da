"""The record of Apple's GPUs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from gapless.device.accelerator import AcceleratorDevice
from gapless.device.seam import Program

# torch.mps is typed only in part, and differently from version to version.
torch_mps: Any = torch.mps


class MpsDevice(AcceleratorDevice):
    """Apple's GPU, by torch.mps. Never run.

    Facts of torch 2.13 and its main branch: every torch.Stream is the default one (ATen/mps/MPSGuardImpl.h); events can
    be asked, and elapsed_time waits for the whole queue (MPSEvent.mm), so fences have the host's times. Copies that do
    not block wrap pages of the host's memory (native/mps/operations/Copy.mm) at offsets that 4 divides; pinned memory
    was of the wrong device before pytorch 181720, and is not needed. Memory is shared with the host.
    """

    kind = "mps"
    torch_type = "mps"
    caps = AcceleratorDevice.caps._replace(
        slow=True, fp8=False, rows=64, step_tokens=2048,
        operations=1e11,  # an M1 at a twentieth of its peak: operators are launched one by one
    )  # fmt: skip
    pins = False
    times = False
    one_queue = True
    missing: ClassVar[tuple[str, ...]] = (
        "Kernels are plain torch: there is no Triton.",
        "Nothing is captured: Metal has no graphs of torch's operators.",
        "All work is in one queue: a copy of tokens waits for the step before it.",
        "There is no float64; models in bfloat16 need macOS 14, and FP8 is not there.",
        "Memory is the host's too: --gpu-memory-utilization is a share of what Metal recommends as a maximum.",
    )

    def memory(self) -> tuple[int, int]:
        total = int(torch_mps.recommended_max_memory())
        return max(0, total - int(torch_mps.driver_allocated_memory())), total

    def driver_calls(self, *kinds: str) -> int:
        return 0  # torch.mps does not count them

    def peak(self, program: Program, *args: Any) -> int:
        return 0  # torch.mps counts no peaks, so nothing is run
