"""Facts about the CUDA device that kernels are launched on. None of these functions waits."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capturing() -> bool:
    """Return whether the current stream of this thread is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


def vendor() -> str:
    """Return who makes the GPUs that this torch is built for: nvidia or amd."""
    return "amd" if torch.version.hip else "nvidia"


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory that one block may have."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def current() -> int:
    """Return the number of this thread's current device."""
    return torch.cuda.current_device()


def make_current(device: int) -> None:
    """Make this thread launch on the device with this number."""
    torch.cuda.set_device(device)


def mps_runs() -> bool:
    """Return whether NVIDIA's MPS serves this user's processes: then several compute on one GPU at the same time."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return (Path(folder) / "control").exists()
