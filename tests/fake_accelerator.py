"""The fake accelerator for tests: a device whose streams are late by a seed."""

from __future__ import annotations

from typing import Any

from gapless.device import Device, device_class
from gapless.testing import fake


def fake_device(seed: int = 0, mood: str = "off", captures: bool = True) -> Device:
    """Open the fake. Streams are in time (off), late by the seed (seeded), or wait to be waited for (lazy)."""
    fake.load()
    fake.delays(None if mood == "off" else seed, 100, {"lazy": True}.get(mood))
    device: Any = device_class("fake").open(0)
    if not captures:
        device.caps = device.caps._replace(captures=False)
    return device
