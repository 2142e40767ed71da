"""The seam of a device: streams, fences, a pinned ring. Everything else in the package sees only this.

Rules that hold on every device:

- A stream runs its programs in the order of launch. Streams are ordered against each other by fences alone.
- Programs run in torch.inference_mode. They do not launch, record or wait.
- A program that raises poisons the device: no later program runs, and every fence not yet passed raises DeviceError.
  A fence that had passed before stays passed; what it guards is good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gapless.device.ring import Ring

Program = Callable[..., None]

STREAMS = ("compute", "token_out", "bulk_out", "bulk_in")
"""The streams that every device has, by name."""


class Fence(Protocol):
    """A point of one stream."""

    def done(self) -> bool:
        """Whether all work before this point has completed; never blocks.

        Raises:
            DeviceError: the device failed before this point was reached.
        """
        ...

    def wait(self) -> None:
        """Block the host until done; only the loop's observe and drain call it. Raises as `done`."""
        ...

    def time(self) -> int:
        """When this point was passed: ns on the scale of Device.clock. The fence must be timed, and seen as done."""
        ...


class Stream(Protocol):
    """A queue of programs that the device works through in order."""

    @property
    def name(self) -> str: ...

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        """Enqueue `program(*args)` and return at once. `reads` and `writes` name the buffers it touches.

        Raises:
            DeviceError: the device has failed or is closed. The program's own error shows at later fences instead.
        """
        ...

    def record(self, timed: bool = False) -> Fence:
        """A new fence behind all that was launched so far."""
        ...

    def after(self, fence: Fence) -> None:
        """Later work of this stream waits for `fence`; the host does not."""
        ...


class Device(Protocol):
    """Where steps run. `compute` runs the steps, `token_out` brings tokens home, the bulk streams move KV pages."""

    @property
    def kind(self) -> str:
        """cpu, cuda or sim."""
        ...

    @property
    def torch_device(self) -> torch.device: ...
    @property
    def maps_host(self) -> bool:
        """Whether a program may write ring memory directly; elsewhere a `download` behind a fence brings bytes home."""
        ...

    @property
    def compute(self) -> Stream: ...
    @property
    def token_out(self) -> Stream: ...
    @property
    def bulk_out(self) -> Stream: ...
    @property
    def bulk_in(self) -> Stream: ...

    def clock(self) -> int:
        """Host time in ns: time.monotonic_ns, or virtual time on a simulated device."""
        ...

    def ring(self, slots: int, nbytes: int) -> Ring:
        """`slots` host buffers of `nbytes` bytes, zeroed, 64-byte aligned, pinned where copies need it."""
        ...

    def upload(self, dst: Tensor, src: Tensor) -> None:
        """Inside a program: copy host `src` (ring memory) to device `dst` in stream order. Same shape and dtype."""
        ...

    def download(self, dst: Tensor, src: Tensor) -> None:
        """Inside a program: copy device `src` to host `dst` (ring memory) in stream order. Same shape and dtype."""
        ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device's memory."""
        ...

    def run(self, program: Program, *args: Any) -> None:
        """Launch on compute and wait; for start-up. Raises DeviceError when the program raises."""
        ...

    def fail(self, error: BaseException) -> None:
        """From any thread: pending and later waits and launches raise DeviceError caused by `error`. First one wins."""
        ...

    def drain(self) -> None:
        """Wait for all that was launched; for start-up and shutdown. Raises DeviceError when the device has failed."""
        ...

    def close(self) -> None:
        """Drop what has not started, let what runs end (a grace, then an interrupt), stop all threads.

        May be called in any state and repeatedly. Warns (RuntimeWarning) of a program that cannot be interrupted.
        """
        ...
