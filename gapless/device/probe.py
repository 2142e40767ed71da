"""Tries the capabilities that AcceleratorDevice needs: a backend without one is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gapless.base.errors import ConfigError
from gapless.base.progress import warn
from gapless.device.seam import STREAMS

Backend = type[Any]
"""A subclass of AcceleratorDevice"""


class Need(NamedTuple):
    """A capability, its description, and a trial, which raises or returns False if the capability is missing."""

    capability: str
    what: str
    tried: Callable[[Backend, torch.device], bool]


def _queues(backend: Backend, device: torch.device) -> bool:
    if backend.one_queue:
        return True
    streams = [backend.new_stream(device, 0) for _ in STREAMS]
    return len({stream.stream_id for stream in streams} | {0}) == len(STREAMS) + 1


def _events(backend: Backend, device: torch.device) -> bool:
    return isinstance(_recorded(backend, device, False).query(), bool)


def _times(backend: Backend, device: torch.device) -> bool:
    if not backend.times:
        return True
    first, second = _recorded(backend, device, True), _recorded(backend, device, True)
    second.synchronize()
    return isinstance(first.elapsed_time(second), float)


def _recorded(backend: Backend, device: torch.device, timed: bool) -> Any:
    event: Any = backend.new_event(device, timed)
    event.record(torch.accelerator.current_stream(device))
    return event


def _pinned(backend: Backend, device: torch.device) -> bool:
    return not backend.pins or torch.zeros(1, pin_memory=True).is_pinned()


NEEDS = (
    Need("streams", "streams of its own", _queues),
    Need("events", "events that a thread can query", _events),
    Need("times", "events with times, which its record promises", _times),
    Need("pinned memory", "host memory that copies can read while the host runs ahead", _pinned),
)


def lacking(backend: Backend, device: torch.device) -> Iterator[tuple[Need, Exception | None]]:
    """Yield the needed capabilities that this device does not have, and the backend's own errors."""
    for need in NEEDS:
        try:
            if not need.tried(backend, device):
                yield need, None
        except (RuntimeError, AttributeError) as error:
            yield need, error


def admit(backend: Backend, device: torch.device) -> None:
    """Raise ConfigError if the device lacks a needed capability; warn of a record that has never run."""
    for need, error in lacking(backend, device):
        lacks = f"{backend.kind} has no {need.what} (capability {need.capability})"
        raise ConfigError(f"device: {lacks}: use --device cpu{f'; it reported: {error}' if error else ''}") from error
    if not backend.has_run:
        warn(f"device: {backend.kind} has never run on its hardware: compare its tokens with --device cpu first")
