"""Tries the capabilities that AcceleratorDevice needs: a backend without one is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gapless.base.errors import ConfigError
from gapless.base.progress import warn

Backend = type[Any]
"""A subclass of AcceleratorDevice"""


class Need(NamedTuple):
    """A capability, its description, and a trial, which raises or returns False where it is lacking."""

    capability: str
    what: str
    tried: Callable[[Backend, torch.device], bool]


def _queues(backend: Backend, device: torch.device) -> bool:
    return backend.one_queue or backend.new_stream(device, 0) is not None


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


def lacking(backend: Backend, device: torch.device) -> Iterator[Need]:
    """Yield the needed capabilities that this device does not have."""
    for need in NEEDS:
        try:
            has = need.tried(backend, device)
        except (RuntimeError, AttributeError):
            has = False
        if not has:
            yield need


def admit(backend: Backend, device: torch.device) -> None:
    """Raise ConfigError if the device lacks a needed capability; warn of a record that has never run."""
    for need in lacking(backend, device):
        raise ConfigError(f"device: {backend.kind} has no {need.what} (capability {need.capability}): use --device cpu")
    if not backend.has_run:
        warn(f"device: {backend.kind} has never run on its hardware: compare its tokens with --device cpu first")
