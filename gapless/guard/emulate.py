"""CUDA as far as a program's set-up asks for it, on a machine that has none. Time and streams are not played: every
operation runs at once, on the CPU, in the order of the calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from gapless.guard import marks
from gapless.guard.patches import patched

_DEVICE = torch.device("cuda", 0)


class Event:
    """An event that has passed as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Passed already."""

    def wait(self, stream: Any = None) -> None:
        """Everything is in order already."""

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) / 1e6


class Stream:
    """A stream that is always idle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _DEVICE

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is queued."""

    def wait_event(self, event: Event) -> None:
        """Everything is in order already."""

    def wait_stream(self, stream: Stream) -> None:
        """Everything is in order already."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


_STREAM = Stream()

_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: "the CPU, playing CUDA",
    "get_device_capability": lambda device=None: (0, 0),
    # torch.manual_seed calls these after the CPU's generator, which is the one that is used here.
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_stats": lambda device=None: {},
    "host_memory_stats": lambda: {},
    "get_sync_debug_mode": lambda: 0,
    "set_sync_debug_mode": lambda mode: None,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "stream": lambda stream: nullcontext(stream),
}


@contextmanager
def emulated_cuda() -> Iterator[None]:
    """torch.cuda answers as if there were one device; tensors on it are played by the CPU inside regions.

    Does nothing where CUDA is there.
    """
    if torch.cuda.is_available():
        yield
        return
    before = marks.emulated
    with ExitStack() as stack:
        for name, answer in {**_ANSWERS, "Event": Event, "Stream": Stream}.items():
            stack.enter_context(patched(torch.cuda, name, answer))
        marks.emulated = _DEVICE
        try:
            yield
        finally:
            marks.emulated = before
