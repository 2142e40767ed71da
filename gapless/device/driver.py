"""Calls of CUDA beyond torch: memory that processes share, and kernels of a source text. Each raises RuntimeError."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gapless.base.errors import ConfigError
from gapless.device.nvrtc import compiled

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * HANDLE_BYTES)]


class Driver:
    """The driver and the runtime that torch uses, for one device."""

    def __init__(self, device: torch.device) -> None:
        """Load the libraries. Raises ConfigError if one cannot be found."""
        self._device = device
        version: Any = torch.version.cuda
        try:
            self._runtime = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}")
            self._driver = ctypes.CDLL("libcuda.so.1")
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f"several ranks on CUDA need torch's libcudart and the driver's libcuda: {error}"
            ) from None
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._runtime.cudaMemset.argtypes = [address, ctypes.c_int, size]
        self._runtime.cudaMemsetAsync.argtypes = [address, ctypes.c_int, size, address]
        self._runtime.cudaFree.argtypes = self._runtime.cudaIpcCloseMemHandle.argtypes = [address]
        self._runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), address]
        self._runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(address), _Handle, ctypes.c_uint]
        self._runtime.cudaHostGetDevicePointer.argtypes = [ctypes.POINTER(address), address, ctypes.c_uint]
        self._driver.cuLaunchKernel.argtypes = [address, *[ctypes.c_uint] * 7, address, address, address]

    def stream(self) -> int:
        """Return this thread's current stream."""
        return int(torch.cuda.current_stream().cuda_stream)

    def device(self) -> tuple[bytes, int]:
        """Return the device's identifier, 16 bytes, and its number of multiprocessors."""
        facts: Any = torch.cuda.get_device_properties(self._device)
        return bytes(facts.uuid.bytes), int(facts.multi_processor_count)

    def take(self, nbytes: int) -> int:
        """Return zeroed memory of the device that can be exported: a whole allocation of the driver's."""
        found = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._check(self._runtime.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(nbytes)))
            self._check(self._runtime.cudaMemset(found, 0, nbytes))
            self._check(self._runtime.cudaDeviceSynchronize())
        assert found.value is not None
        return found.value

    def free(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._check(self._runtime.cudaFree(address))

    def export(self, address: int) -> bytes:
        """Return the handle that another process needs to map this memory."""
        handle = _Handle()
        self._check(self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map another process's memory, on this device or a peer; return its address here."""
        found = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        with torch.cuda.device(self._device):
            self._check(self._runtime.cudaIpcOpenMemHandle(ctypes.byref(found), given, _LAZY_PEER_ACCESS))
        assert found.value is not None
        return found.value

    def close(self, address: int) -> None:
        """Unmap memory that `open` has mapped."""
        self._check(self._runtime.cudaIpcCloseMemHandle(address))

    def on_device(self, address: int) -> int:
        """Return the kernels' address of pinned memory of the host."""
        found = ctypes.c_void_p()
        self._check(self._runtime.cudaHostGetDevicePointer(ctypes.byref(found), address, 0))
        assert found.value is not None
        return found.value

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """Fill memory of the device with a byte, in the order of the stream."""
        with torch.cuda.device(self._device):
            self._check(self._runtime.cudaMemsetAsync(address, byte, nbytes, stream))

    def kernels(self, name: str, text: str, defines: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
        """Compile a source text for the device, and return its kernels of these names."""
        major, minor = torch.cuda.get_device_capability(self._device)
        options = (*(f"-D{key}={value}" for key, value in defines.items()), f"-arch=sm_{major}{minor}", "-std=c++17")
        module = ctypes.c_void_p()
        binary, found = compiled(name, text, options), {}
        with torch.cuda.device(self._device):
            self._driven(self._driver.cuModuleLoadData(ctypes.byref(module), binary))
        for one in names:
            kernel = ctypes.c_void_p()
            self._driven(self._driver.cuModuleGetFunction(ctypes.byref(kernel), module, one.encode()))
            assert kernel.value is not None
            found[one] = kernel.value
        return found

    def launch(self, kernel: int, blocks: int, threads: int, argument: ctypes.Structure, stream: int) -> None:
        """Enqueue a kernel whose one argument is this structure. A capture of the stream records it."""
        place = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self._driven(self._driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, place, None))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error: {self._runtime.cudaGetErrorString(code).decode()}")

    def _driven(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'').decode() or code}")
