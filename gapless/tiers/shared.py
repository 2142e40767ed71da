"""Memory of pages that other processes of the host can read in place: the giver's file without a name."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
T = TypeVar("T")
MOST_COPIES = 4
"""Threads of a tier that copy"""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux, which mmap does not name"""


class PageMemory:
    """Places of one size. `fd` is what another process maps; -1 where the system has no such files."""

    def __init__(self, places: int, place_bytes: int) -> None:
        self.place_bytes = place_bytes
        self.nbytes = places * place_bytes
        self.fd = _sealed_file(self.nbytes)
        memory = mmap.mmap(self.fd, self.nbytes)
        with suppress(OSError):  # Linux before 5.14
            memory.madvise(POPULATE_WRITE)  # else the first copy into each page takes several times as long
        self._bytes = np.frombuffer(memory, np.uint8)

    def write(self, place: int, data: memoryview) -> None:
        np.copyto(self._at(place, len(data)), np.frombuffer(data, np.uint8))

    def read(self, place: int, nbytes: int) -> memoryview:
        return self._at(place, nbytes).data

    def close(self) -> None:
        """No process can map it any more. The memory goes with the last one that reads it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _at(self, place: int, nbytes: int) -> Bytes:
        start = place * self.place_bytes
        return self._bytes[start : start + nbytes]


class Copies:
    """Threads that copy pages, several at once: one reaches a fraction of what the memory allows."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(MOST_COPIES, os.cpu_count() or 1), "gapless-copy")

    def each(self, copy: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """Return what `copy` does with each; raises what the first that failed raises."""
        return [*self._threads.map(copy, *arguments)]

    def close(self) -> None:
        self._threads.shutdown()


def mapped(fd: int) -> Bytes:
    """Return another process's memory, to read. Raises OSError unless it keeps its size: else a read could crash."""
    if not hasattr(fcntl, "F_GET_SEALS") or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the peer's memory may shrink")
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ), np.uint8)


def _sealed_file(nbytes: int) -> int:
    with suppress(AttributeError, OSError):  # other systems, and kernels that emulate this one, have none
        fd = os.memfd_create("gapless-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError:
            os.close(fd)
            raise
        return fd
    return -1
