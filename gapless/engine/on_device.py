"""Runs start-up work on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gapless.base.errors import DeviceError, UserError
from gapless.device import Device

T = TypeVar("T")


def on_device(device: Device, build: Callable[[], T]) -> T:
    """Run `build` on the compute stream, so that its allocations are ordered before every step."""
    made: list[T] = []

    def program() -> None:
        made.append(build())

    try:
        device.run(program)
    except DeviceError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    return made[0]
