"""Building an engine over a model. Importing this does not import torch; building does, and reports it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gapless.base import progress
from gapless.engine.rank_process import start_ranks

if TYPE_CHECKING:
    from gapless.base.config import EngineConfig
    from gapless.base.part import Part
    from gapless.engine.core import EngineCore


def build_core(config: EngineConfig, parts: Sequence[Part] = ()) -> EngineCore:
    """Return the core of a located config; `parts` and errors as in `gapless.engine.wiring`."""
    began = time.monotonic()
    processes = start_ranks(config)  # they import torch meanwhile
    if "torch" not in sys.modules:
        progress.announce("loading torch")
    from gapless.engine import wiring

    spent = [("torch", round(time.monotonic() - began, 3))]
    built = wiring.build_core(config, spent=spent, parts=parts, processes=processes)
    progress.log.info("ready in %.1f s", time.monotonic() - began)
    return built
