"""Building an engine over a model. Importing this does not import torch; building does, and reports it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gapless.base import progress

if TYPE_CHECKING:
    from gapless.base.config import EngineConfig
    from gapless.base.part import Part
    from gapless.engine.core import EngineCore


def build_core(config: EngineConfig, parts: Sequence[Part] = ()) -> EngineCore:
    """Return the core of a located config; `parts` and errors as in `gapless.engine.wiring`."""
    began = time.monotonic()
    if "torch" not in sys.modules:
        progress.announce("loading torch")
    from gapless.engine import wiring

    built = wiring.build_core(config, spent=[("torch", round(time.monotonic() - began, 3))], parts=parts)
    progress.log.info("ready in %.1f s", time.monotonic() - began)
    return built
