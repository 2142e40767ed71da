"""The buffers under watch, found by address: so views, and arrays that share a tensor's memory, are the same buffer."""

from __future__ import annotations

import ctypes
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from torch import Tensor

from . import marks
from .race_agents import Agent
from .race_shadow import Extent, Layout, Ranges, Rows, Shadow


@dataclass(slots=True, eq=False)
class Buffer:
    """One piece of memory with a name, or without one a storage that is watched all the same."""

    start: int
    end: int
    shadow: Shadow
    name: str
    group: object
    """Shared by buffers that stand for each other, such as the slots of a ring: one report is enough for all."""
    keep: object
    """Holds the memory, so that the address cannot become another's unnoticed. A storage holds its buffer instead,
    and here is whose it is."""
    host: bool
    """Whether this is host memory, whose checksums are taken, since it may be written without torch."""
    site: int = -1
    """The number of the stack that first used a buffer without a name; -1 for one with a name."""
    writes: int = 0
    """The number of writes that were seen."""
    on_device: bool = False
    """Whether this is known to be device memory."""
    pool: Agent | None = None
    """The stream of its allocation, if that was seen."""


def region_of(tensor: Tensor) -> Extent | None:
    """Return an access to all of a tensor; None for one without memory of its own. This runs at every operator."""
    try:
        low = tensor.data_ptr()
    except RuntimeError:
        return None  # sparse, fake, or another tensor without memory
    if tensor.is_contiguous():
        nbytes = tensor.nbytes
        return (low, low + nbytes, None, None) if nbytes else None
    return _with_gaps(tensor, low) if tensor.numel() else None


def _with_gaps(tensor: Tensor, low: int) -> Extent:
    itemsize = tensor.element_size()
    dims = [(size, stride * itemsize) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    high = low + itemsize + sum((size - 1) * stride for size, stride in dims)
    return low, high, Layout(tuple(d[0] for d in dims), tuple(d[1] for d in dims), itemsize), None


def region_of_array(memory: np.ndarray[Any, Any]) -> Extent:
    """Return an access to all of an array. Gaps count as part of it."""
    low = high = int(memory.__array_interface__["data"][0])
    if memory.flags.c_contiguous:
        return low, low + memory.nbytes, None, None
    for size, stride in zip(memory.shape, memory.strides, strict=True):
        reach = (size - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high + memory.itemsize, None, None


class Checksum:
    """The checksum of a piece of host memory at the time when a program that uses it was launched."""

    __slots__ = ("_memory", "_value", "_writes", "buffer", "part")

    def __init__(self, buffer: Buffer, region: Extent) -> None:
        low, high = max(region[0], buffer.start), min(region[1], buffer.end)
        self.buffer = buffer
        self.part = f"bytes {low - buffer.start}..{high - buffer.start}"
        # The memory is taken by its address: a view made by torch would be an access itself.
        self._memory = memoryview((ctypes.c_char * (high - low)).from_address(low))
        self._value = zlib.crc32(self._memory)
        self._writes = buffer.writes

    def changed(self) -> bool:
        """Return whether the memory was written unseen. Clocks order, or report, the writes that were seen."""
        return self.buffer.writes == self._writes and zlib.crc32(self._memory) != self._value


_BUFFER = "_gapless_buffer"
"""The attribute of a storage that holds its buffer."""


class WatchedBuffers:
    """Registered buffers, which do not overlap, and storages that were not registered but are watched all the same."""

    def __init__(self) -> None:
        self.by_name: dict[str, Buffer] = {}
        self.named: list[Buffer] = []
        self.edges: tuple[list[int], list[int]] = ([], [])
        """Starts and ends of the registered buffers, in order."""
        self._mine = object()
        """Distinguishes the storages that these buffers watch from earlier checkers' storages."""

    def add(self, name: str, group: str, region: Extent, granularity: int, keep: Any, host: bool) -> None:
        """Watch this memory; `granularity` is bytes a row, 0 for exact ranges. Raises ValueError."""
        if name in self.by_name:
            raise ValueError(f"a buffer named {name!r} is registered already: give each its own name")
        start, end = region[:2]
        for other in self.find(start, end):
            raise ValueError(f"{name!r} overlaps {other.name!r}: register the whole once; its views are known")
        shadow = Rows(start, end - start, granularity) if granularity else Ranges(start)
        self.by_name[name] = Buffer(start, end, shadow, name, group, keep, host)
        self._sort()

    def begin_again(self) -> None:
        """Forget all accesses."""
        self._mine = object()
        for buffer in self.named:
            rows, start, nbytes = buffer.shadow, buffer.start, buffer.end - buffer.start
            buffer.shadow = Rows(start, nbytes, rows.stride) if isinstance(rows, Rows) else Ranges(start)

    def keep_only(self, names: set[str]) -> None:
        """Forget the registered buffers with other names."""
        self.by_name = {name: buffer for name, buffer in self.by_name.items() if name in names}
        self._sort()

    def _sort(self) -> None:
        # New lists: a thread that searches the old ones meanwhile finds them whole.
        ordered = sorted(self.by_name.values(), key=attrgetter("end"))
        edges = [b.start for b in ordered], [b.end for b in ordered]
        self.named, self.edges = ordered, edges

    def find(self, low: int, high: int) -> list[Buffer]:
        """Registered buffers that share a byte with these addresses."""
        buffers = self.named
        first = last = bisect_right(self.edges[1], low)
        while last < len(buffers) and buffers[last].start < high:
            last += 1
        return buffers[first:last]

    def place(self, tensor: Tensor, site: int) -> tuple[Buffer, Extent] | None:
        """The buffer that stands for this tensor's storage, and its place there; None if it has no memory.

        torch keeps the storage's object, and what is set on it, for as long as there is the storage: the memory's next
        owner has another one, and is first seen at `site`.
        """
        # The same test as in `region_of`, which costs too much as a call from here.
        try:
            low = tensor.data_ptr()
        except RuntimeError:
            return None
        if not low:
            return None  # empty, or on no device
        if tensor.is_contiguous():
            high = low + tensor.nbytes
            region: Extent = low, high, None, None
        else:
            region = _with_gaps(tensor, low)
            high = region[1]
        storage = tensor.untyped_storage()
        buffer: Buffer | None = getattr(storage, _BUFFER, None)
        # A buffer that another checker left, or from before the storage was resized, does not count.
        if buffer is None or low < buffer.start or high > buffer.end or buffer.keep is not self._mine:
            buffer = self._begin(marks.PINNED.covering(storage) or storage, site)
            setattr(storage, _BUFFER, buffer)
        return buffer, region

    def resized(self, storage: Any) -> None:
        """Forget the buffer of a storage that has other memory now."""
        setattr(storage, _BUFFER, None)

    def _begin(self, storage: Any, site: int) -> Buffer:
        """Return the buffer of a storage, a new one unless it has one already."""
        buffer: Buffer | None = getattr(storage, _BUFFER, None)
        start = storage.data_ptr()
        end = start + storage.nbytes()
        if buffer is None or buffer.keep is not self._mine or buffer.end != end:
            buffer = Buffer(start, end, Ranges(start), "", None, self._mine, False, site)
            setattr(storage, _BUFFER, buffer)
        return buffer
