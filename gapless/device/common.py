"""Common parts of devices whose memory is the host's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.base import host
from gapless.device.ring import Fence, Ring, copy, zeros_of_pages
from gapless.device.seam import Device, Stream


class HostMemoryDevice(Device):
    """A device whose programs run on the host, in its memory."""

    torch_device = torch.device("cpu")
    attendant: Stream

    def attend(self, work: Callable[[], None], fence: Fence | None = None) -> None:
        if fence is not None:
            self.attendant.after(fence)
        self.attendant.launch(work)

    def ring(self, slots: int, nbytes: int) -> Ring:
        return Ring(slots, nbytes, pin=False)

    def host_memory(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        return zeros_of_pages(nbytes) if memory is None else memory

    def adopt(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        return lambda: None

    def memory(self) -> tuple[int, int]:
        return host.memory()

    upload = download = staticmethod(copy)

    def reserve(self, programs: int, graphs: int) -> None:
        pass

    def allocations(self) -> int:
        return 0
