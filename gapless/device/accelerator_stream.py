"""Torch's streams and events behind the seam: the parts of AcceleratorDevice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.bell import Bell
from gapless.device.event_clock import EventClock
from gapless.device.fault import Fault
from gapless.device.record import Tape
from gapless.device.ring import Fence, check_upload, copy
from gapless.device.seam import Program, Stream
from gapless.device.worker import PythonQueue, Worker

SPIN_NS = 50_000
"""A wait polls for this long before it sleeps: a thread's wake-up costs about as much."""


# torch.accelerator is typed only in part, and differently from version to version.
torch_accelerator: Any = torch.accelerator


class CurrentStream:
    """A context manager that makes a stream the calling thread's current one. torch.Stream is one too, but stores the
    previous stream in itself, so it can be neither nested nor entered by two threads."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch_accelerator.current_stream(self._stream.device)
        torch_accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch_accelerator.set_stream(self._before)


class Common(NamedTuple):
    """The parts that the streams of a device share."""

    fault: Fault
    clock: EventClock | None
    """The clock of timed events; None if events have no times."""
    waiter: Worker
    new_event: Callable[[bool], Any]
    """A function that makes an event, with a time if its argument is true."""
    under: Callable[[Any], AbstractContextManager[Any]]
    """Makes a stream the calling thread's current one."""


class AcceleratorWorker(Worker):
    """A thread for a device's waits. It selects the device first: else a backend may open a context on device 0."""

    def __init__(self, name: str, choose: Callable[[], None], fault: Fault) -> None:
        super().__init__(name, queue := PythonQueue(name, fault))
        queue.put(choose, ())


class AcceleratorFence:
    """One event, recorded once."""

    __slots__ = ("_clock", "_event", "_fault", "_lost", "_recorded", "_seen", "_timed", "_waiter")

    def __init__(self, stream: AcceleratorStream, timed: bool) -> None:
        common = stream.common
        self._fault = common.fault
        self._lost = common.fault.error is not None
        """Whether the device had failed before: the work before this fence never ran."""
        self._clock = common.clock
        self._waiter = common.waiter
        self._timed = timed
        self._seen = 0
        self._recorded = time.monotonic_ns() if timed else 0
        self._event = common.new_event(timed)
        stream.call(self._event.record, stream.raw)

    def done(self) -> bool:
        if self._seen:
            return True
        # On a failed device too: work enqueued before the failure may have ended well.
        if not self._lost and self._query():
            return True
        if self._fault.error is not None:
            self._fault.check()
        return False

    def wait(self, bell: Bell | None = None) -> bool:
        end = time.monotonic_ns() + SPIN_NS
        while not self.done():
            if bell is not None and bell.rung:
                return False
            if time.monotonic_ns() > end:
                self.sleep(bell)
        return True

    def time(self) -> int:
        assert self._timed and self._seen, "time() needs record(timed=True) and a fence seen as done"
        return self._seen if self._clock is None else self._clock.at(self._event, self._recorded, self._seen)

    def follow(self, stream: AcceleratorStream) -> None:
        """Make later work of `stream` wait for this point."""
        stream.call(stream.raw.wait_event, self._event)

    def attend(self, work: Callable[[], None]) -> None:
        """Run `work` once this fence has passed. The calling thread has no other task, and may hang with the device."""
        if self._has_passed() and not self._lost:
            work()

    def _query(self) -> bool:
        try:
            if not self._event.query():
                return False
        except RuntimeError as error:
            # A kernel failed; every later call of the process would raise the same error.
            self._fault.set(error, "the device reported")
            self._fault.check()
        self._fault.ask()
        self._seen = time.monotonic_ns()
        return True

    def sleep(self, bell: Bell | None) -> None:
        # The event is waited for on a helper thread: a hung device never returns from it, and fail() must wake us.
        woken = threading.Event()
        self._waiter.put(self._synchronize, (woken,))
        self._fault.block(woken, bell)

    def _synchronize(self, woken: threading.Event) -> None:
        self._has_passed()
        woken.set()

    def _has_passed(self) -> bool:
        """Wait on a thread with no other task; return whether the device has not failed."""
        try:
            self._event.synchronize()
            return True
        except RuntimeError as error:
            self._fault.set(error, "the device reported")
            return False


class AcceleratorStream:
    """A torch stream; programs enqueue their kernels at once, from the calling thread."""

    def __init__(self, name: str, raw: Any, common: Common, ringer: Worker) -> None:
        self.name = name
        self.raw = raw
        self.common = common
        self.fault = common.fault
        self._ringer = ringer

    def launch(self, program: Program, *args: Any, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = ()) -> None:
        self.fault.check()
        if observe.watcher is not None:
            program = observe.watcher.launched(self, program, args, reads)
        try:
            with self.common.under(self.raw), torch.inference_mode():
                program(*args)
        except BaseException as error:
            self.fault.set(error, f"a program on stream {self.name!r} raised")
            # An interrupt belongs to the host thread; a program's error shows at the fences, as on any device.
            if not isinstance(error, Exception):
                raise

    def upload(self, dst: Tensor, src: Tensor) -> None:
        check_upload(dst, src)
        self.launch(copy, dst, src, reads=(src,), writes=(dst,))

    def replay(self, graph: AcceleratorGraph) -> None:
        self.launch(graph.raw.replay, reads=graph.reads, writes=graph.writes)

    def record(self, timed: bool = False) -> AcceleratorFence:
        return AcceleratorFence(self, timed)

    def after(self, fence: Fence) -> None:
        assert isinstance(fence, AcceleratorFence), "a fence of another kind of device"
        fence.follow(self)

    def ring(self, bell: Bell) -> None:
        self._ringer.put(self.record().attend, (bell.ring,))

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call into the backend; an error that an earlier kernel left behind fails the device, and shows at fences."""
        try:
            function(*args)
        except RuntimeError as error:
            self.fault.set(error, f"the device reported, on stream {self.name!r}")


class AcceleratorGraph:
    def __init__(self, key: Hashable, raw: Any, tape: Tape | None, owners: tuple[Any, ...]) -> None:
        """`owners` keep the memory of a program that was not recorded."""
        self.key = key
        self.reads, self.writes = (tape.reads, tape.writes) if tape else ((), ())
        self.owners = owners
        self.raw = raw

    def launch(self, stream: Stream, parts: Sequence[Tensor] = ()) -> None:
        assert isinstance(stream, AcceleratorStream), "a stream of another kind of device"
        if observe.watcher is not None:
            written = {part.untyped_storage().data_ptr(): part for part in parts}
            writes = tuple([written.get(whole.untyped_storage().data_ptr(), whole) for whole in self.writes])
            observe.watcher.replayed(stream, f"graph {self.key}", self.reads, writes)
        stream.replay(self)
