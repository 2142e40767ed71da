"""Loops for tests, in a line."""

from __future__ import annotations

from typing import Any

from gapless.device import Device
from gapless.loop.build import build_loop
from gapless.loop.loop import Loop
from gapless.loop.spec import LoopSpec, Sizes
from gapless.model.seam import Model


def loop_of(device: Device, model: Model, sizes: Sizes, depth: int | None = None, **asks: Any) -> Loop:
    """Build a loop; `asks` are further fields of its `LoopSpec`."""
    return build_loop(device, model, LoopSpec(sizes, depth, **asks))
