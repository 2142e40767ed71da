"""Fences, and the ring of host buffers whose slots are reused only after one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.errors import ConfigError

ALIGN = 64
PAGE_BYTES = 4096


class Fence(Protocol):
    """A point of one stream that the host can ask about or wait for."""

    def done(self) -> bool:
        """Return whether all work before this point has completed; never blocks. Raises DeviceError where the device
        failed before this point was reached."""
        ...

    def wait(self, bell: Any = None) -> bool:
        """Block the host until done, or until the device's `bell` is rung, if it is given. Returns whether done.

        Only the loop's observe and drain call it. Raises as `done`.
        """
        ...

    def time(self) -> int:
        """Return when this point was passed, in ns of Device.clock. The fence must be timed, and seen as done."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RingSlot:
    """One host buffer: `tensor` and `array` are the same bytes, uint8 [nbytes]."""

    index: int
    tensor: Tensor
    _array: npt.NDArray[np.uint8]

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes for the host, which must be the slot's only user now: a race checker counts this as a write."""
        if observe.watcher is not None:
            observe.watcher.touched(self.tensor)
        return self._array


class Ring:
    """Slots handed out in turn. A slot is taken by `acquire`, given back by `retire`, free once its fence is done."""

    def __init__(self, slots: int, nbytes: int, pin: bool) -> None:
        assert slots >= 1 and nbytes >= 1, f"a ring of {slots} slots of {nbytes} bytes"
        stride = -(-nbytes // ALIGN) * ALIGN
        memory = _aligned_zeros(slots * stride, pin)
        self.memory = memory.view(slots, stride)
        """All slots as uint8 [slots, stride], for a program that finds its slot on the device."""
        tensors = [memory[i * stride : i * stride + nbytes] for i in range(slots)]
        self.slots = tuple(RingSlot(i, tensor, tensor.numpy()) for i, tensor in enumerate(tensors))
        self._held = [False] * slots
        self._fences: list[Fence | None] = [None] * slots
        self._next = 0

    def acquire(self) -> RingSlot | None:
        """Return the next slot in ring order, or None while it may be in use; never waits. Raises as its fence."""
        index = self._next
        fence = self._fences[index]
        if self._held[index] or (fence is not None and not fence.done()):
            return None
        self._held[index] = True
        self._fences[index] = None
        self._next = (index + 1) % len(self.slots)
        return self.slots[index]

    def retire(self, slot: RingSlot, fence: Fence) -> None:
        """Give `slot` back; it is handed out again only when `fence`, recorded after its last use, is done."""
        index = slot.index
        assert self.slots[index] is slot and self._held[index], f"slot {index} was retired without being acquired"
        self._held[index] = False
        self._fences[index] = fence

    def in_use(self, kept: Collection[RingSlot] = ()) -> list[int]:
        """Return the slots, other than `kept` ones, that are in use or whose fences have not passed."""
        states = zip(self.slots, self._held, self._fences, strict=True)
        late = [slot for slot, held, fence in states if held or (fence is not None and not fence.done())]
        return [slot.index for slot in late if slot not in kept]


def _aligned_zeros(nbytes: int, pin: bool) -> Tensor:
    options: dict[str, Any] = {"pin_memory": True} if pin else {}
    raw = torch.zeros(nbytes + ALIGN, dtype=torch.uint8, **options)
    start = -raw.data_ptr() % ALIGN
    return raw[start : start + nbytes]


def zeros_of_pages(nbytes: int) -> Tensor:
    """Return zeroed bytes, uint8 [nbytes], that begin with a page of the operating system, which fills it in when it is
    first used. Raises ConfigError where the host has no room for them."""
    try:
        raw = np.zeros(nbytes + PAGE_BYTES, np.uint8)
    except MemoryError as error:
        raise ConfigError(f"the host has no {nbytes:,} bytes of memory: ask for less") from error
    start = -raw.ctypes.data % PAGE_BYTES
    return torch.from_numpy(raw[start : start + nbytes])  # its storage begins there, as is_pinned needs


def host_bytes(memory: Tensor) -> memoryview:
    """Return host memory as bytes, for rooms without torch."""
    return memory.numpy().reshape(-1).data


def check_upload(dst: Tensor, src: Tensor) -> None:
    """Assert that a copy moves bytes alone: otherwise `Stream.upload` would convert, or wait on CUDA."""
    alike = dst.dtype == src.dtype and dst.shape == src.shape
    assert alike and dst.is_contiguous() and src.is_contiguous() and src.is_cpu, "not an upload of bytes"


def copy(dst: Tensor, src: Tensor) -> None:
    """Copy `src` to `dst`: the program of an upload if host and device memory are one."""
    dst.copy_(src, non_blocking=True)
