"""The fake accelerator for tests: a device whose streams are late by a seed, and processes that use it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gapless.device import Device, build, device_class
from gapless.testing import fake


def fake_device(seed: int = 0, mood: str = "off", captures: bool = True) -> Device:
    """Open the fake. Streams are in time (off), late by the seed (seeded), or wait to be waited for (lazy)."""
    fake.load()
    fake.delays(None if mood == "off" else seed, 100, {"lazy": True}.get(mood))
    device: Any = device_class("fake").open(0)
    if not captures:
        device.caps = device.caps._replace(captures=False)
    return device


def skip_without_compiler() -> None:
    if not build.may_have(fake.EXTENSION):
        pytest.skip("there is no C++ compiler, which the fake accelerator needs")


def child_environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that uses the fake, which torch pins no memory for if it sees a GPU."""
    skip_without_compiler()
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", **more}
