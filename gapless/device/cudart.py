"""The few calls of CUDA's runtime that every step makes, without torch in between: they take a fraction of the time.

torch loads the runtime; this finds the loaded library. If it cannot be found, torch does the calls.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_HOST_TO_DEVICE = 1


class Cudart:
    """Calls on one stream. Each enqueues and returns at once, and raises RuntimeError as torch does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._name = library.cudaGetErrorString
        self._name.restype, self._name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self._copy = library.cudaMemcpyAsync
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self._launch = library.cudaGraphLaunch
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def upload(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy pinned host memory to the device."""
        self._check(self._copy(dst, src, nbytes, _HOST_TO_DEVICE, stream))

    def launch(self, graph: int, stream: int) -> None:
        self._check(self._launch(graph, stream))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error: {self._name(code).decode()}")


def load() -> Cudart | None:
    """Return the runtime that torch uses, if it can be found by its name."""
    version: Any = torch.version.cuda
    if version is None:
        return None
    try:
        return Cudart(ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}"))
    except (OSError, AttributeError):
        return None
