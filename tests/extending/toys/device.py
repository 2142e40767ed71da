"""A device whose programs run when they are launched, on the caller's thread: for debuggers; nothing overlaps."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from gapless.base.bell import Bell
from gapless.base.errors import DeviceError
from gapless.device.common import HostMemoryDevice
from gapless.device.fault import Fault
from gapless.device.ring import Fence, check_upload, copy
from gapless.device.seam import ATTENDANT, STREAMS, Caps, Program


class InlineFence:
    """Passed since it was recorded, unless the device had failed."""

    def __init__(self, fault: Fault, timed: bool) -> None:
        self.fault, self.timed = fault, timed
        self.at = time.monotonic_ns() if fault.error is None else 0

    def done(self) -> bool:
        if not self.at:
            self.fault.check()
        return True

    def wait(self, bell: Bell | None = None) -> bool:
        return self.done()

    def time(self) -> int:
        assert self.timed, "time() needs record(timed=True)"
        return self.at


class InlineStream:
    def __init__(self, name: str, fault: Fault) -> None:
        self.name, self.fault = name, fault

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        self.fault.check()
        try:
            with torch.inference_mode():
                program(*args)
        except Exception as error:  # raised at later fences
            self.fault.set(error, self.name)

    def upload(self, dst: Tensor, src: Tensor) -> None:
        check_upload(dst, src)
        self.launch(copy, dst, src)

    def record(self, timed: bool = False) -> InlineFence:
        return InlineFence(self.fault, timed)

    def after(self, fence: Fence) -> None:
        """Do nothing: what was launched before has ended."""

    def ring(self, bell: Bell) -> None:
        self.launch(bell.ring)


class InlineDevice(HostMemoryDevice):
    kind = "inline"
    caps = Caps("native", slow=True)

    def __init__(self) -> None:
        self.fault = Fault()
        self.bell = Bell(self.fault.check)
        self.fault.wakes(self.bell.ring)
        streams = [InlineStream(name, self.fault) for name in (*STREAMS, ATTENDANT)]
        self.compute, self.token_out, self.bulk_out, self.bulk_in, self.attendant = streams

    def drain(self) -> None:
        self.fault.check()

    def close(self) -> None:
        self.fault.set(DeviceError("it was closed"), "the device is gone")
