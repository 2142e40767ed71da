"""What kernels ask of the CUDA device that they are launched on. Neither question waits."""

from __future__ import annotations

import torch


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capturing() -> bool:
    """Whether the current stream of this thread is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability."""
    return torch.cuda.get_device_capability(device)
