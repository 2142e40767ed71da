"""CpuDevice: each stream is a FIFO worked by its own thread, so the host runs ahead as it does of a GPU."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from gapless.base import host, observe
from gapless.base.bell import Bell
from gapless.base.errors import CaptureError
from gapless.device import cpu_native
from gapless.device.common import HostMemoryDevice
from gapless.device.cpu_native import NativeGraph, NativeStream
from gapless.device.fault import Fault
from gapless.device.record import record_on
from gapless.device.ring import Fence, check_upload, copy
from gapless.device.seam import ATTENDANT, STREAMS, Caps, Program
from gapless.device.worker import PythonQueue, Worker, shut, switch_interval


class CpuFence:
    """Passed when the stream's thread reaches it."""

    __slots__ = ("_at", "_fault", "_timed", "_waits", "mark")

    def __init__(self, fault: Fault, timed: bool) -> None:
        self._fault = fault
        self._timed = timed
        self._at = 0
        self._waits: list[threading.Event] = []
        self.mark: observe.Mark | None = None

    def done(self) -> bool:
        if self._at:
            if self.mark is not None:
                self.mark.passed()
            return True
        if self._fault.error is not None:
            self._fault.check()
        return False

    def wait(self, bell: Bell | None = None) -> bool:
        self.block(bell)
        if not self._at:
            self._fault.check()
            assert bell is not None, "only a failure or a bell ends a wait early"
            return False
        if self.mark is not None:
            self.mark.passed()
        return True

    def time(self) -> int:
        assert self._timed and self._at, "time() needs record(timed=True) and a fence that is done"
        return self._at

    def block(self, bell: Bell | None = None) -> None:
        """Block until this is passed, the device fails, or the bell is rung."""
        if self._at:
            return
        wait = threading.Event()
        self._waits.append(wait)
        # In this order: either `reach` sees the new wait, or this sees that it has passed.
        if not self._at:
            self._fault.block(wait, bell)

    def reach(self) -> None:
        """Note that the stream's thread has reached this point."""
        self._at = time.monotonic_ns()
        for wait in self._waits:
            wait.set()


class CpuStream:
    """A stream whose programs run on a thread of its own, worked in Python: for machines without a compiler."""

    def __init__(self, name: str, fault: Fault, threads: int) -> None:
        self.name = name
        self.worker = Worker(name, PythonQueue(name, fault), threads)
        self._put = self.worker.put
        self._fault = fault

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        if self._fault.error is not None:
            self._fault.check()
        if observe.watcher is not None:
            program = observe.watcher.launched(self, program, args, reads)
        self._put(program, args)

    def upload(self, dst: Tensor, src: Tensor) -> None:
        check_upload(dst, src)
        self.launch(copy, dst, src, reads=(src,), writes=(dst,))

    def record(self, timed: bool = False) -> CpuFence:
        fence = CpuFence(self._fault, timed)
        if observe.watcher is not None:
            fence.mark = observe.watcher.recorded(self)
        self._put(fence.reach, ())
        return fence

    def after(self, fence: Fence) -> None:
        assert isinstance(fence, CpuFence), "a fence of another kind of device"
        if observe.watcher is not None:
            observe.watcher.waits(self, fence.mark)
        self._put(fence.block, ())

    def ring(self, bell: Bell) -> None:
        self.launch(bell.ring)


def threads_of(cores: int) -> int:
    """Return how many compute threads to use: of four cores and more one, of eight and more two are left to other work.

    A compute thread that waits for a core holds up all the others. On an Intel Xeon with 12 usable cores, one of which
    another program used too, 8 rows of the Qwen3-0.6B shape got 286 tokens/s and a TTFT of 247 ms with 10 threads, 210
    and 935 with 12.
    """
    return cores - (cores >= 4) - (cores >= 8)


class CpuDevice(HostMemoryDevice):
    """`threads` torch threads for compute; 0 takes `threads_of` the cores that the process may use.

    The streams are native, and capture graphs, if they can be built (see `cpu_native`); with `use_native` False they
    are worked in Python.
    """

    kind = "cpu"
    caps = Caps("native", captures=True, slow=True)

    def __init__(self, threads: int = 0, use_native: bool = True) -> None:
        # Fixes the calling thread's own count before the workers' counts change torch's global default.
        torch.get_num_threads()
        self.threads = threads or threads_of(host.usable_cores())
        self.fault = fault = Fault()
        counts = {name: self.threads if name == "compute" else 1 for name in (*STREAMS, ATTENDANT)}
        captures = use_native and cpu_native.load() is not None
        self.caps = self.caps._replace(captures=captures)
        self._streams: tuple[CpuStream | NativeStream, ...]
        if captures:
            native = cpu_native.extension()
            hub = native.Hub(fault.check)
            fault.wakes(hub.fail)
            self.bell = native.Bell(hub)
            self._streams = tuple([NativeStream(name, hub, fault, count) for name, count in counts.items()])
        else:
            self.bell = Bell(fault.check)
            fault.wakes(self.bell.ring)
            self._streams = tuple([CpuStream(name, fault, count) for name, count in counts.items()])
        self.compute, self.token_out, self.bulk_out, self.bulk_in, self.attendant = self._streams
        switch_interval.shorten()
        self._shut = weakref.finalize(self, shut, fault, [stream.worker for stream in self._streams])

    @classmethod
    def open(cls, threads: int) -> CpuDevice:
        return cls(threads)

    def capture(self, key: Hashable, program: Program, buffers: tuple[Any, ...] = ()) -> NativeGraph:
        if not self.caps.captures:
            raise CaptureError(
                f"the cpu device has no native streams: {cpu_native.reason() or 'they were not asked for'}"
            )
        return NativeGraph(key, record_on(self, key, program, buffers))

    def drain(self) -> None:
        self.fault.check()
        for fence in [stream.record() for stream in self._streams if stream.worker.started]:
            fence.wait()

    def close(self) -> None:
        self._shut()
        if observe.watcher is not None:
            observe.watcher.closed(self._streams)
