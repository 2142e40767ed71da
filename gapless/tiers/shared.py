"""Memory of pages that other processes of the host can read in place: the giver's file without a name."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gapless.base.errors import ConfigError
from gapless.base.host import usable_cores

Bytes = NDArray[np.uint8]
T = TypeVar("T")
MOST_COPIES = 8
"""Threads of a tier that copy, at most, and half of the processors"""
POPULATE_READ, POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and _WRITE of Linux, which mmap does not name"""
SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE, which fcntl does not name: mappings that are there may write, later ones may not."""


class PageMemory:
    """Places of one size. `fd` is what another process maps; -1 where the system has no such files."""

    def __init__(self, places: int, place_bytes: int) -> None:
        self.places, self.place_bytes = places, place_bytes
        self.nbytes = places * place_bytes
        self.fd = _file(self.nbytes)
        memory = mmap.mmap(self.fd, self.nbytes)
        if self.fd >= 0 and not _sealed(self.fd):
            self.close()
        _populate(memory)
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
        self._count = max(2, min(MOST_COPIES, usable_cores() // 2))
        self._threads = ThreadPoolExecutor(self._count, "gapless-copy")

    def each(self, copy: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
        """Return what `copy` does with each, when all have ended; raises what the first that failed raises."""
        pages = [*zip(*arguments, strict=True)]
        share = -(-len(pages) // self._count) or 1
        shares = [pages[first : first + share] for first in range(0, len(pages), share)]
        begun = [self._threads.submit(lambda some: [copy(*one) for one in some], some) for some in shares]
        wait(begun)
        return [result for one in begun for result in one.result()]

    def close(self) -> None:
        self._threads.shutdown()


def mapped(fd: int) -> Bytes:
    """Return another process's memory, to read. Raises OSError unless it keeps its size: else a read could crash."""
    if not hasattr(fcntl, "F_GET_SEALS") or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the peer's memory may shrink")
    if not (nbytes := os.fstat(fd).st_size):
        raise OSError("the peer's memory is empty")
    memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    with suppress(OSError):  # Linux before 5.14: then the first copy out of each page takes several times as long
        memory.madvise(POPULATE_READ)
    return np.frombuffer(memory, np.uint8)


def _file(nbytes: int) -> int:
    with suppress(AttributeError, OSError):  # other systems, and kernels that emulate this one, have none
        fd = os.memfd_create("gapless-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        return fd
    return -1


def _sealed(fd: int) -> bool:
    """Keep the file's size, and let no other process write to it; return whether the system can."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:  # Linux before 5.1
        return False
    return True


def _populate(memory: mmap.mmap) -> None:
    """Have all of it there: else the first copy into each page takes several times as long."""
    try:
        memory.madvise(POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise ConfigError(
                f"kv_tiers: the host has no {len(memory):,} bytes for peer pages: ask for less"
            ) from error
