"""The engine's process with the test double in place of a model.

`python -m gapless.testing.worker SOCKET VOCABULARY SECONDS [STEP]`: a step takes SECONDS, and number STEP fails.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from gapless.engine.worker import run

if TYPE_CHECKING:
    from gapless.base.config import EngineConfig
    from gapless.base.records import Turn
    from gapless.engine.seam import Core


def build_fake(config: EngineConfig) -> Core:
    """The core that the command line describes; the config has nothing for it."""
    from gapless.testing.core import FakeCore

    vocabulary, seconds, *fail_at = sys.argv[2:]

    class Paced(FakeCore):
        def step(self) -> Turn:
            time.sleep(float(seconds))
            return super().step()

    return Paced(int(vocabulary), fail_at_step=int(fail_at[0]) if fail_at else None)


if __name__ == "__main__":
    run(build_fake)
