"""The seam of a device: streams, fences, a pinned ring. Everything else in the package sees only this.

Rules that hold on every device:

- A stream runs its programs in the order of launch. Streams are ordered against each other by fences alone.
- Programs run in torch.inference_mode. They do not launch, record or wait.
- A graph is a program that was captured once and is replayed as a whole. It behaves as its program would when launched:
  same order, same fences, same errors. The memory that it reads and writes has fixed addresses, and the graph keeps it
  alive.
- A program that raises poisons the device: no later program runs, and every fence not yet passed raises DeviceError.
  A fence that had passed before stays passed; the memory that it guards is good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.base.bell import Bell
from gapless.base.errors import CaptureError
from gapless.base.observe import Program as Program
from gapless.device.fault import Fault
from gapless.device.ring import Fence, Ring

STREAMS = ("compute", "token_out", "bulk_out", "bulk_in")
ATTENDANT = "attendant"
"""The name of the host's thread that attends fences."""


class Stream(Protocol):
    """A queue of programs that the device works through in order."""

    name: str

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        """Enqueue `program(*args)` and return at once. `reads` and `writes` name the buffers it touches.

        Raises:
            DeviceError: the device has failed or is closed. The program's own error shows at later fences instead.
        """
        ...

    def upload(self, dst: Tensor, src: Tensor) -> None:
        """Enqueue a copy of host `src` (ring memory) to device `dst`, contiguous, of one shape and dtype; as `launch`.

        `src` is read when the stream gets there: it must not be written before a later fence is done.
        """
        ...

    def record(self, timed: bool = False) -> Fence:
        """Return a new fence, which is passed when all that was launched so far is done."""
        ...

    def after(self, fence: Fence) -> None:
        """Make later work of this stream wait for `fence`; the host does not wait."""
        ...

    def ring(self, bell: Bell) -> None:
        """Ring `bell` when all that was launched so far is done; return at once. Nothing rings on a failed device."""
        ...


class Graph(Protocol):
    """A captured program."""

    key: Hashable

    def launch(self, stream: Stream, parts: Sequence[Tensor] = ()) -> None:
        """Enqueue a replay and return at once. `parts` are all that it writes of their memory, chosen by an index on
        the device: for checkers that cannot see its operators. Raises as `Stream.launch`."""
        ...


class Caps(NamedTuple):
    """Capabilities of a device, and the sizes that suit it. The defaults fit programs of plain PyTorch in the host's
    memory."""

    kernels: str = "torch"
    """Kernels that its programs may launch: torch, native (C++ in the host's memory) or triton"""
    captures: bool = False
    """True if `capture` works."""
    maps_host: bool = True
    """Whether a program may write ring memory directly; else a `download` after a fence copies the bytes"""
    own_memory: bool = False
    """True if the device has memory of its own. Otherwise its programs use the host's, and leave most of that free."""
    real_time: bool = True
    """True if the device runs in the host's time. In simulated time no thread beside the loop may watch or help."""
    sums: str = "host"
    """Sums over ranks: host (C++ in memory that their processes share), peers (kernels in memory that GPUs map of each
    other), or none"""
    registers: bool = True
    """True if `host_memory` can pin memory that other processes share."""
    fp8: bool = True
    """Whether tensors in FP8 work"""
    polled: bool = False
    """Whether programs order their accesses to the host's memory, so that its threads may poll it during a step"""
    pads: bool = False
    """Whether padding a step to a captured one takes less time than launching its kernels"""
    slow: bool = False
    """True if a prompt of the usual step budget, or captures at the start, would hold up other requests for long."""
    launch_queue: int = 0
    """Operators that fit into a stream's launch queue before a launch waits in the driver; 0 if no bound is known."""
    rows: int = 64
    """Default number of requests that run at once."""
    drafted_rows: int = 8
    """Most rows of a step with drafts: more rows keep the device busy without drafts"""
    step_tokens: int = 1024
    """Default token budget of a step"""
    operations: float = 2e10
    """Operations a second of the slowest device of the kind, for the watchdog's deadlines; here two old cores."""


class Device(Protocol):
    """Runs steps: `compute` computes them, `token_out` copies tokens to the host, the bulk streams move KV."""

    kind: str
    """The device's name, for people and in the identity of KV pages"""
    caps: Caps
    torch_device: torch.device

    compute: Stream
    token_out: Stream
    bulk_out: Stream
    bulk_in: Stream
    bell: Bell
    """The bell, which ends the waits of this device that were passed it."""
    fault: Fault

    @classmethod
    def open(cls, threads: int) -> Device:
        """Open this process's device. `threads` are for a compute stream on the host: 0 for most usable cores.

        Raises: ConfigError: there is no such device here.
        """
        return cls()

    def attend(self, work: Callable[[], None], fence: Fence | None = None) -> None:
        """Run `work()` on a thread of the host once `fence` has passed, and return at once.

        There is one such thread, which does all that it is given in that order, without inference mode's tensors: what
        it shares with programs is memory of the host. Work that raises fails the device.
        """
        ...

    def clock(self) -> int:
        """Host time in ns: time.monotonic_ns, or virtual time on a simulated device."""
        return time.monotonic_ns()

    def ring(self, slots: int, nbytes: int) -> Ring:
        """Return `slots` host buffers of `nbytes` bytes, zeroed, 64-byte aligned, pinned where copies need it."""
        ...

    def host_memory(self, nbytes: int, memory: Tensor | None = None) -> Tensor:
        """Return `nbytes` bytes of host memory, uint8, zeroed, aligned to 4096, pinned where copies need it: `memory`,
        where there is some already.

        For start-up. On a CPU, memory is taken when it is first used.
        """
        ...

    def adopt(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None] | None:
        """Let programs read this memory of the host, which is another process's: whole pages that this one has mapped.

        Returns a function that ends it, to be called after the last program that reads the memory, unless the device
        has closed; None if the device cannot. From any thread.
        """
        ...

    def upload(self, dst: Tensor, src: Tensor) -> None:
        """Inside a program: copy host `src` (ring memory) to device `dst` in stream order. Same shape and dtype."""
        ...

    def download(self, dst: Tensor, src: Tensor) -> None:
        """Inside a program: copy device `src` to host `dst` (ring memory) in stream order. Same shape and dtype."""
        ...

    def capture(self, key: Hashable, program: Program, buffers: tuple[Any, ...] = ()) -> Graph:
        """Make a graph of `program(*buffers)`. Waits for compute; for start-up, or for a bucket that is new.

        A device may run the program once to observe it (cpu and sim do, cuda does not, apart from warm-up runs).
        So the caller captures with inert inputs: whatever it finds in the buffers must be harmless to run.
        All that the program decides on the host is frozen: what varies from step to step comes from tensors.
        Programs whose keys have equal attributes `kind` run the same code: a device may check the first one alone.

        Raises:
            CaptureError: the program waits for the device (a host read, a size that depends on data, a blocking copy),
                moves an outside tensor (resize_, set_, .data =), or raised an error of its own, such as for want of
                memory. The device continues; nothing is poisoned, and memory taken meanwhile is freed.
            DeviceError: the device has failed.
        """
        raise CaptureError(f"a device of the kind {self.kind} captures nothing")

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes of the device's memory."""
        ...

    def reserve(self, programs: int, graphs: int) -> None:
        """Take memory for programs on compute and for captures ahead, so that neither waits for the driver.

        Start-up only. Does nothing where taking memory waits for nothing.
        """
        ...

    def allocations(self) -> int:
        """Return how often memory was taken from the driver or given back: each time the device had to be idle.
        0 where there is no such driver."""
        ...

    def peak(self, program: Program, *args: Any) -> int:
        """Run as `run`; return the most bytes that the program took at once, 0 where they are not counted."""
        self.run(program, *args)
        return 0

    def run(self, program: Program, *args: Any) -> None:
        """Launch on compute and wait; for start-up. Raises DeviceError when the program raises."""
        self.compute.launch(program, *args)
        self.compute.record().wait()

    def fail(self, error: BaseException) -> None:
        """Make waits and launches raise DeviceError caused by `error`. Called from any thread; the first one wins."""
        self.fault.set(error, "the device was failed")

    def drain(self) -> None:
        """Wait for all that was launched; for start-up and shutdown. Raises DeviceError when the device has failed."""
        ...

    def close(self) -> None:
        """Drop work that has not started, let running work end (a grace, then an interrupt), stop all threads.

        May be called in any state and repeatedly. Warns (RuntimeWarning) of a program that cannot be interrupted.
        """
        ...
