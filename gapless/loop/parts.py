"""The parts of a loop."""

from __future__ import annotations

from typing import NamedTuple

from gapless.base.part import Part
from gapless.loop.masks import Masks
from gapless.offload.transfers import Transfers
from gapless.step.adapters import AdapterLoader


class LoopParts(NamedTuple):
    """The parts of a loop; None for a feature that it lacks."""

    every: tuple[Part, ...] = ()
    """All parts, in the order of their calls."""
    adapters: AdapterLoader | None = None
    transfers: Transfers | None = None
    """Copies of KV pages in host memory."""
    masks: Masks | None = None
