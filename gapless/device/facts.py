"""Facts about memory, and about the GPU that kernels are launched on. None of these functions waits."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

HOST = torch.device("cpu")
"""The host's memory"""
HOST_KEY, ANY_KEY = "CPU", "CompositeExplicitAutograd"
"""Dispatch keys of torch: of implementations for the host's memory, and for every device that has none of its own"""


def on_host(tensor: Tensor) -> bool:
    """Return whether the host may read a tensor's memory at once."""
    return tensor.is_cpu


def vector_unit() -> str:
    """Return the widest vector unit that torch's own code for the host uses."""
    return torch.backends.cpu.get_cpu_capability().lower()


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
