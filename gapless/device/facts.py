"""Facts about memory, and about the GPU that kernels are launched on. None of these functions waits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HOST = torch.device("cpu")
"""The host's memory"""
INTEL = "xpu"
"""torch's type of Intel's GPUs"""
CDNA = ("gfx90a", "gfx942", "gfx950")
"""AMD's GPUs that the Triton kernels are compiled for"""
HOST_KEY, ANY_KEY = "CPU", "CompositeExplicitAutograd"
"""Dispatch keys of torch: of implementations for the host's memory, and for every device that has none of its own"""


def on_host(tensor: Tensor) -> bool:
    """Return whether the host may read a tensor's memory at once."""
    return tensor.is_cpu


def vector_unit() -> str:
    """Return the widest vector unit that torch's own code for the host uses."""
    return torch.backends.cpu.get_cpu_capability().lower()


def built_for() -> str:
    """Return the platform that this torch is built for, such as CUDA 12.8; empty for the CPU alone."""
    for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("XPU", torch.version.xpu)):
        if version:
            return f"{name} {version}"
    return ""


def _properties(device: torch.device) -> Any:
    """Return a GPU's properties, by its type's module: torch.cuda, which serves ROCm too, or torch.xpu."""
    return torch.get_device_module(device).get_device_properties(device)


def multiprocessors(device: torch.device) -> int:
    found = _properties(device)
    return int(found.gpu_subslice_count if device.type == INTEL else found.multi_processor_count)


def capturing() -> bool:
    """Return whether the current stream of this thread is being captured into a graph."""
    ask = getattr(torch.get_device_module(), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def vendor(device: torch.device) -> str:
    """Return the vendor of a GPU: nvidia, amd or intel."""
    return "intel" if device.type == INTEL else "amd" if torch.version.hip else "nvidia"


def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's generation in its vendor's count; Intel has none, and gets zeros."""
    return (0, 0) if device.type == INTEL else torch.cuda.get_device_capability(device)


def compiled_for(device: torch.device) -> bool:
    """Return whether the Triton kernels are compiled ahead of time for GPUs like this one. Others of AMD's count a
    block's stores in other instructions."""
    if vendor(device) != "amd":
        return device.type != INTEL
    return str(_properties(device).gcnArchName).startswith(CDNA)


def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory that one block may have."""
    found = _properties(device)
    names = ("shared_memory_per_block_optin", "shared_memory_per_block", "local_mem_size")
    return int(next(getattr(found, name) for name in names if hasattr(found, name)))


def current() -> int:
    """Return the number of this thread's current device."""
    return torch.accelerator.current_device_index()


def make_current(device: int) -> None:
    """Make this thread launch on the device with this number."""
    torch.accelerator.set_device_index(device)


def mps_runs() -> bool:
    """Return whether NVIDIA's MPS serves this user's processes: then several compute on one GPU at the same time."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return (Path(folder) / "control").exists()
