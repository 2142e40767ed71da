"""Building an engine over a model. Importing this does not import torch; building does, and reports it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from gapless.base import progress

if TYPE_CHECKING:
    from gapless.base.config import EngineConfig
    from gapless.engine.core import EngineCore


def build_core(config: EngineConfig) -> EngineCore:
    """Return the core of a located config; errors as in `gapless.engine.core`."""
    began = time.monotonic()
    if "torch" not in sys.modules:
        progress.announce("loading torch")
    from gapless.engine import core

    built = core.build_core(config, spent=[("torch", round(time.monotonic() - began, 3))])
    progress.log.info("ready in %.1f s", time.monotonic() - began)
    return built
