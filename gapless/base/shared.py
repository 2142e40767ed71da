"""Memory that other processes of the host can read in place: a file without a name."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from gapless.base.errors import ConfigError

Bytes = NDArray[np.uint8]
POPULATE_READ, POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and _WRITE of Linux, which mmap does not name"""
SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE, which fcntl does not name: existing mappings may write, later ones may not."""


class SharedMemory:
    """Memory of this process that peers of the host may map, to read. `fd` is the mapped file; -1 if the system has no
    such files, or does not keep their size."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        """Map `fd`, a file of this size, and take it over; its owner calls `seal`. Without one, make a sealed file.

        Raises ConfigError where the host has no room for it."""
        self.fd = _file(nbytes) if fd is None else fd
        self._end = weakref.finalize(self, os.close, self.fd) if self.fd >= 0 else None
        memory = mmap.mmap(self.fd, nbytes)
        if fd is None:
            self.seal()
        self.data = np.frombuffer(memory, np.uint8)
        _populate(self.data)

    def seal(self) -> None:
        """Let no process that maps it from now on write to it, or close it where the system cannot."""
        if self.fd >= 0 and not _sealed(self.fd):
            self.close()

    def start_of(self, part: memoryview) -> int:
        """Return where a part of this memory begins."""
        return int(np.frombuffer(part, np.uint8).ctypes.data - self.data.ctypes.data)

    def close(self) -> None:
        """No process can map it any more. The memory goes with the last one that has it."""
        if self._end is not None:
            self._end()
        self.fd = -1


class PeerMemory:
    """The memory of a peer of this host, as this process has mapped it, to read. A page that is lent may change there
    all the same: a copy counts if its checksum is right."""

    def __init__(self, data: Bytes, close: Callable[[], None] | None = None) -> None:
        """`close` ends what lets the device read it; without one, the device cannot."""
        self.data = data
        self.readable = close is not None
        self.leases = 0
        """Jobs that have borrowed pages, and not given them back"""
        self._close = close

    def close(self) -> None:
        """No program reads it any more."""
        if self._close is not None:
            self._close()
            self._close = None


def mapped(fd: int) -> Bytes:
    """Return another process's memory, to read. Raises OSError unless it keeps its size: else a read could crash."""
    if not hasattr(fcntl, "F_GET_SEALS") or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the peer's memory may shrink")
    if not (nbytes := os.fstat(fd).st_size):
        raise OSError("the peer's memory is empty")
    data = np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8)
    with suppress(OSError):  # Linux before 5.14: then the first copy out of each page takes several times as long
        _advise(data, POPULATE_READ)
    return data


def empty_file() -> int:
    """Return a file for a `SharedMemory`, of no bytes. Raises OSError, AttributeError."""
    return os.memfd_create("gapless-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _file(nbytes: int) -> int:
    with suppress(AttributeError, OSError):  # other systems, and kernels that emulate this one, have none
        fd = empty_file()
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


def _advise(data: Bytes, what: int) -> None:
    """Call madvise without the interpreter's lock, which mmap's own keeps for as long as it takes. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data)), what):
        raise OSError(number := ctypes.get_errno(), os.strerror(number))


def _populate(data: Bytes) -> None:
    """Allocate all pages now: otherwise the first copy into each takes several times as long."""
    try:
        _advise(data, POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 5.14
            raise ConfigError(
                f"kv_tiers: the host has no {len(data):,} bytes for the host tier: ask for less"
            ) from error
