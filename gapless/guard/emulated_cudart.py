"""Stands for `torch.cuda.cudart()`, the functions of CUDA's runtime that torch passes on."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import marks
from .emulated_device import total_memory
from .refusals import refuse


class CudaStatus(IntEnum):
    """The results of these functions, by CUDA's numbers."""

    success = 0
    invalid_value = 1
    already_registered = 712
    not_registered = 713


_TEXTS = {
    CudaStatus.success: "no error",
    CudaStatus.invalid_value: "invalid argument",
    CudaStatus.already_registered: "part or all of the requested memory range is already mapped",
    CudaStatus.not_registered: "pointer does not correspond to a registered memory region",
}


class CudaRuntime:
    """The module that `cudart` returns. Registered host memory counts as pinned, by its address."""

    cudaError = CudaStatus

    def cudaGetErrorString(self, error: int) -> str:
        return _TEXTS[CudaStatus(error)]

    def cudaProfilerStart(self) -> CudaStatus:
        return CudaStatus.success

    def cudaProfilerStop(self) -> CudaStatus:
        return CudaStatus.success

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return total_memory(), total_memory()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> CudaStatus:
        if not address or size <= 0:
            return CudaStatus.invalid_value
        if address in marks.PINNED.registered:
            return CudaStatus.already_registered
        with _disable_current_modes(), marks.FunctionsOff():
            memory = (ctypes.c_char * size).from_address(address)
            over = torch.frombuffer(memory, dtype=torch.uint8)
            marks.PINNED.add(over)
            marks.PINNED.registered[address] = over.untyped_storage()
        return CudaStatus.success

    def cudaHostUnregister(self, address: int) -> CudaStatus:
        known = marks.PINNED.registered.pop(address, None)
        return CudaStatus.not_registered if known is None else CudaStatus.success

    def __getattr__(self, name: str) -> Any:
        raise refuse(f"torch.cuda.cudart().{name}")
