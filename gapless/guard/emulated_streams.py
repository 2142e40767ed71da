"""Streams and events of an emulated CUDA: every operation runs at once, in the order of the calls.

Streams and events order nothing; but each has its identity, so that a checker sees which stream an operation was given
to, and a query is answered as if the work took time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Self

import torch

from . import marks
from .emulated_progress import Point, StreamProgress

DEVICE = torch.device("cuda", 0)
"""The one device. Its number is the one that the process chose, as a rank does whose launcher started several."""
_STREAM: Any = torch.cuda.Stream

_handles = count(1)


progress = StreamProgress(0)
"""The records that the host has waited for. Each run has its own."""


class Event:
    """An event whose work has run as soon as it is recorded."""

    device = property(lambda event: DEVICE)
    enable_timing: bool
    blocking: bool
    _at: int | None = None
    _point: Point
    _refusals = -1
    """The number of queries that are yet to be answered with False; below 0 until one is asked."""

    # As torch's own, these are made by `__new__`: a subclass may have an `__init__` that does not call another.
    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Self:
        made = super().__new__(cls)
        made.enable_timing, made.blocking, made._point = enable_timing, blocking, {}
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `__new__` has used."""

    def record(self, stream: EmulatedStream | None = None) -> None:
        self._at = time.perf_counter_ns()
        self._point, self._refusals = progress.record((stream or current_stream()).cuda_stream), -1

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Let the stream's later work come after the event's."""
        progress.wait((stream or current_stream()).cuda_stream, self._point)

    def query(self) -> bool:
        """Return whether the event has passed: not at once, unless the host has waited for it."""
        if not progress.has_passed(self._point):
            if self._refusals < 0:
                self._refusals = progress.refusals()
            if self._refusals:
                self._refusals -= 1
                return False
            progress.waited(self._point)
        return True

    def synchronize(self) -> None:
        """Note that the event has passed."""
        progress.waited(self._point)

    def elapsed_time(self, end_event: Event) -> float:
        """The milliseconds between two events. Raises RuntimeError if one is not timed or not recorded."""
        if self._at is None or end_event._at is None or not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be made with enable_timing=True and be recorded")
        return (end_event._at - self._at) / 1e6


class AnyEvent(Event):
    """Stands for `torch.Event`, which takes a device first."""

    def __new__(
        cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Self:
        return super().__new__(cls, enable_timing, blocking, interprocess)


class EmulatedStream:
    """A stream whose work has run. As `torch.Stream` it can be entered by `with`."""

    device = property(lambda stream: DEVICE)
    device_index = property(lambda stream: DEVICE.index)
    priority: int
    cuda_stream: int
    stream_id: int

    def __new__(cls, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made.priority = priority
        made.cuda_stream = made.stream_id = next(_handles) if stream_id is None else stream_id
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `__new__` has used."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority, as of current GPUs."""
        return (0, -5)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    # Not torch's own, which look for a class that is another one once the run is over.
    def wait_stream(self, stream: EmulatedStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    __hash__, __repr__ = _STREAM.__hash__, _STREAM.__repr__

    def query(self) -> bool:
        """Return whether the stream is idle: not at once, unless the host has waited for it."""
        if progress.is_busy(self.cuda_stream):
            return False
        # Not by `synchronize`, which reports a wait while a region is checked.
        progress.drain(self.cuda_stream, self == current_stream())
        return True

    def is_capturing(self) -> bool:
        return is_capturing()

    def synchronize(self) -> None:
        """Note that all work of the stream has passed."""
        progress.drain(self.cuda_stream, self == current_stream())

    def __enter__(self) -> EmulatedStream:
        _current.entered.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        set_stream(_current.entered.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmulatedStream) and other.cuda_stream == self.cuda_stream


class ExternalStream(EmulatedStream):
    """A stream that other code has made, by its handle."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> Self:
        return super().__new__(cls, stream_id=stream_ptr)


_DEFAULT = EmulatedStream(stream_id=0)


class _Current(threading.local):
    """The streams that a thread has entered, and what it captures. It begins on the default stream, as on a GPU."""

    def __init__(self) -> None:
        self.stream = _DEFAULT
        self.entered: list[EmulatedStream] = []
        self.captures = False


_current = _Current()


def use_device(device: Any) -> None:
    """Stands for `torch.cuda.set_device`: the emulated device has this number from now on."""
    index = device if isinstance(device, int) else torch.device(device).index
    if index is not None and index >= 0:
        globals()["DEVICE"] = marks.emulated = torch.device("cuda", index)


def current_stream(device: Any = None) -> EmulatedStream:
    return _current.stream


def default_stream(device: Any = None) -> EmulatedStream:
    return _DEFAULT


def set_stream(stream: EmulatedStream | None) -> None:
    if stream is not None:
        progress.use(stream.cuda_stream)
        _current.stream = stream


@contextmanager
def stream(stream: EmulatedStream | None) -> Iterator[None]:
    """Stands for `torch.cuda.stream`; None changes nothing."""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def waited() -> None:
    """Note that the host has waited for the current stream."""
    progress.waited(progress.record(current_stream().cuda_stream))


def synchronize(device: Any = None) -> None:
    """Stands for `torch.cuda.synchronize`."""
    progress.waited_for_all()


def capturing(is_on: bool) -> None:
    """Begin or end a capture of the calling thread."""
    _current.captures = is_on


def is_capturing() -> bool:
    """Return whether the calling thread captures a graph."""
    return _current.captures
