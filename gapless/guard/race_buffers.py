"""The buffers under watch, found by address: so views, and arrays that share a tensor's memory, are the same buffer."""

from __future__ import annotations

import ctypes
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gapless.guard.race_shadow import Layout, Ranges, Rows, Shadow


class Extent(NamedTuple):
    """Addresses `low` to `high`, with gaps when `layout` is given."""

    low: int
    high: int
    layout: Layout | None = None


class Buffer:
    """One piece of memory with a name."""

    __slots__ = ("end", "group", "host", "keep", "name", "shadow", "site", "start", "writes")

    def __init__(self, name: str, group: str, extent: Extent, shadow: Shadow, keep: Any, host: bool) -> None:
        self.name = name
        self.group = group
        """Shared by buffers that stand for each other, such as the slots of a ring: one report is enough for all."""
        self.start, self.end = extent.low, extent.high
        self.shadow = shadow
        self.keep = keep
        """Holds the memory, or weakly its storage, so that the address cannot become another's unnoticed."""
        self.host = host
        """Host memory, which others may write without torch: checksums are taken of it."""
        self.site: int | None = None
        """Where a buffer without a name was first seen."""
        self.writes = 0
        """Writes that were seen."""


def extent_of(tensor: Tensor) -> Extent | None:
    """Where a tensor's bytes lie; None when it has none of its own."""
    try:
        low = tensor.data_ptr()
    except RuntimeError:
        return None  # sparse, fake, or another tensor without memory
    if tensor.is_contiguous():
        nbytes = tensor.nbytes
        return Extent(low, low + nbytes) if nbytes else None
    if not tensor.numel():
        return None
    itemsize = tensor.element_size()
    dims = [(size, stride * itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    high = low + itemsize + sum((size - 1) * stride for size, stride in dims)
    return Extent(low, high, Layout(tuple(d[0] for d in dims), tuple(d[1] for d in dims), itemsize))


def memory_extent(memory: np.ndarray[Any, Any]) -> Extent:
    """Where an array's bytes lie. Gaps are taken as part of it."""
    low = high = int(memory.__array_interface__["data"][0])
    if memory.flags.c_contiguous:
        return Extent(low, low + memory.nbytes)
    for size, stride in zip(memory.shape, memory.strides, strict=True):
        reach = (size - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return Extent(low, high + memory.itemsize)


class _StorageRef:
    """A weak reference to a storage. While it is held, the storage's number is not given to another one."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._number = storage._weak_ref()
        # Taken now: at the interpreter's end torch may be gone before this object is.
        self._expired, self._free = torch.UntypedStorage._expired, torch.UntypedStorage._free_weak_ref

    def expired(self) -> bool:
        return bool(self._expired(self._number))

    def __del__(self) -> None:
        self._free(self._number)  # type: ignore[no-untyped-call]


class Checksum:
    """What a piece of host memory held when a program that uses it was launched."""

    __slots__ = ("_memory", "_value", "_writes", "buffer", "part")

    def __init__(self, buffer: Buffer, extent: Extent) -> None:
        low, high = max(extent.low, buffer.start), min(extent.high, buffer.end)
        self.buffer = buffer
        self.part = f"bytes {low - buffer.start}..{high - buffer.start}"
        # By address: a view made by torch would be an access itself.
        self._memory = memoryview((ctypes.c_char * (high - low)).from_address(low))
        self._value = zlib.crc32(self._memory)
        self._writes = buffer.writes

    def changed(self) -> bool:
        """Whether somebody has written it unseen. Writes that were seen are ordered or reported by their clocks."""
        return self.buffer.writes == self._writes and zlib.crc32(self._memory) != self._value


def _end(buffer: Buffer) -> int:
    return buffer.end


class Buffers:
    """Registered buffers, which do not overlap, and storages that were not registered but are watched all the same."""

    def __init__(self) -> None:
        self.by_name: dict[str, Buffer] = {}
        self._sorted: list[Buffer] = []
        self.edges: tuple[list[int], list[int]] = ([], [])
        """Starts and ends of the registered ones, in order."""
        self.storages: dict[int, Buffer] = {}
        """By the storage's number."""
        self._prune_at = 1024

    def add(self, name: str, group: str, extent: Extent, granularity: int, keep: Any, host: bool) -> Buffer:
        """Watch this memory; `granularity` is bytes a row, 0 for exact ranges. Raises ValueError."""
        if name in self.by_name:
            raise ValueError(f"a buffer named {name!r} is registered already: give each its own name")
        for other in self.find(extent.low, extent.high):
            raise ValueError(f"{name!r} overlaps {other.name!r}: register the whole once; its views are known")
        shadow = Rows(extent.high - extent.low, granularity) if granularity else Ranges()
        buffer = self.by_name[name] = Buffer(name, group, extent, shadow, keep, host)
        self._sort()
        return buffer

    def keep_only(self, names: set[str]) -> None:
        """Forget the other registered ones."""
        self.by_name = {name: buffer for name, buffer in self.by_name.items() if name in names}
        self._sort()

    def _sort(self) -> None:
        # New lists: a thread that searches the old ones meanwhile finds them whole.
        ordered = sorted(self.by_name.values(), key=_end)
        edges = [b.start for b in ordered], [b.end for b in ordered]
        self._sorted, self.edges = ordered, edges

    def find(self, low: int, high: int) -> Iterator[Buffer]:
        """Registered buffers that share a byte with these addresses."""
        buffers = self._sorted
        index = bisect_right(self.edges[1], low)
        while index < len(buffers) and buffers[index].start < high:
            yield buffers[index]
            index += 1

    def automatic(self, tensor: Tensor, site: int) -> Buffer:
        """The buffer that stands for this tensor's storage; it is forgotten with the storage."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        buffer = self.storages.get(number)
        if buffer is None:
            if len(self.storages) > self._prune_at:
                self._prune()
            low = storage.data_ptr()
            extent = Extent(low, low + storage.nbytes())
            weak = _StorageRef(storage)
            # The weak reference keeps the number from being given to another storage while it is held.
            buffer = Buffer("", f"site {site}", extent, Ranges(), weak, False)
            buffer.site = site
            self.storages[number] = buffer
        return buffer

    def _prune(self) -> None:
        self.storages = {n: buffer for n, buffer in self.storages.items() if not buffer.keep.expired()}
        self._prune_at = max(1024, 2 * len(self.storages))
