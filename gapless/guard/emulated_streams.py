"""Streams, events and graphs of an emulated CUDA: every operation runs at once, in the order of the calls.

Streams and events order nothing; but each has its identity, so that a checker sees which stream an operation was given
to. What a graph captures runs at once too, and a replay runs the same operators again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from .patches import holding
from .watch import current

DEVICE = torch.device("cuda", 0)
_STREAM: Any = torch.cuda.Stream

_handles = count(1)
_pools = count(1)


class Event:
    """An event that has passed as soon as it is recorded."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.device = DEVICE
        self.enable_timing = enable_timing
        self.blocking = blocking
        self._at: int | None = None

    def record(self, stream: EmulatedStream | None = None) -> None:
        self._at = time.perf_counter_ns()

    def wait(self, stream: EmulatedStream | None = None) -> None:
        """Do nothing: everything is in order already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the event has passed."""

    def elapsed_time(self, end_event: Event) -> float:
        """The milliseconds between two events. Raises RuntimeError if one is not timed or not recorded."""
        if self._at is None or end_event._at is None or not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be made with enable_timing=True and be recorded")
        return (end_event._at - self._at) / 1e6


class AnyEvent(Event):
    """Stands for `torch.Event`, which takes a device first."""

    def __init__(
        self, device: Any = None, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        super().__init__(enable_timing, blocking, interprocess)


class EmulatedStream:
    """A stream that is always idle. As `torch.Stream` it can be entered by `with`."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any) -> None:
        self.device = DEVICE
        self.priority = priority
        self.device_index = 0
        self.cuda_stream = self.stream_id = next(_handles) if stream_id is None else stream_id

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
        return True

    def is_capturing(self) -> bool:
        return is_capturing()

    def synchronize(self) -> None:
        """Do nothing: nothing is queued."""

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

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(stream_id=stream_ptr)


_DEFAULT = EmulatedStream(stream_id=0)


class _Current(threading.local):
    """The streams that a thread has entered, and what it captures. It begins on the default stream, as on a GPU."""

    def __init__(self) -> None:
        self.stream = _DEFAULT
        self.entered: list[EmulatedStream] = []
        self.captures = False


_current = _Current()


def current_stream(device: Any = None) -> EmulatedStream:
    return _current.stream


def default_stream(device: Any = None) -> EmulatedStream:
    return _DEFAULT


def set_stream(stream: EmulatedStream | None) -> None:
    if stream is not None:
        _current.stream = stream


def stream(stream: EmulatedStream | None) -> AbstractContextManager[None]:
    """Stands for `torch.cuda.stream`; None changes nothing."""
    return nullcontext() if stream is None else holding(_current, stream=stream)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that a graph captures, except views, which only compute an address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replays: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = func._schema.returns
        if any(result.alias_info is None or result.alias_info.is_write for result in results) or not results:
            made = _made(out, args, kwargs)
            self.replays.append(lambda: _again(func, args, kwargs, made))
        return out


class EmulatedGraph:
    """Stands for `torch.cuda.CUDAGraph`: a replay's results are in the capture's memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorder = _Recorder()
        self._pool = (0, next(_pools))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **kwargs: Any) -> None:
        self._pool = pool or self._pool
        _current.captures = True
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        _current.captures = False
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        watch = current()
        quiet: AbstractContextManager[None] = nullcontext() if watch is None else watch.silence()
        with quiet, torch.no_grad():
            for replay in self._recorder.replays:
                replay()

    def reset(self) -> None:
        self._recorder.replays.clear()

    def instantiate(self) -> None:
        """Do nothing: a replay needs no preparation."""

    def pool(self) -> tuple[int, int]:
        return self._pool


def is_capturing() -> bool:
    """Return whether the calling thread captures a graph."""
    return _current.captures


def pool_handle() -> tuple[int, int]:
    return (0, next(_pools))


def replay_too(again: Callable[[], Any]) -> None:
    """Have the graph that the calling thread captures, if it captures one, do this at each replay."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, _Recorder):
            mode.replays.append(again)


def _again(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
    for before, now in zip(made, _made(func(*args, **kwargs), args, kwargs), strict=True):
        before.copy_(now)


def _made(out: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors of a result that are not among the arguments."""
    given = [id(one) for one in tree_leaves((args, kwargs))]
    return [one for one in tree_leaves(out) if isinstance(one, Tensor) and id(one) not in given]
