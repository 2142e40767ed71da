"""The engine's process. `python -m gapless.engine.worker SOCKET` reads its settings as one JSON line on stdin.

SOCKET is the number of the socket that it inherits, over which messages go. From the first line on, the end of stdin
means that the parent is gone, and the process exits. Its stdout is a control pipe: an empty line each second says
"alive", a JSON line is a Doing or a Died message. Everything else it says goes to stderr.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from gapless.engine.life import EXIT_FAILED, Control, Pulse, read_settings

if TYPE_CHECKING:
    from gapless.base.config import EngineConfig
    from gapless.engine.seam import Core


def run(build: Callable[[EngineConfig], Core]) -> NoReturn:
    """Be the engine's process: boot, then drive the core that `build` makes until the parent says stop."""
    for ignored in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)  # the parent decides when to drain
    faulthandler.enable()
    number = int(sys.argv[1])
    os.set_inheritable(number, False)  # the socket is not for the processes that this one starts
    settings = read_settings()
    control = Control()
    pulse = Pulse(control)
    # Imported only now, so that the watch over the parent covers the seconds that these imports take.
    from gapless.engine.worker_loop import serve

    served = serve(number, settings, control, pulse, build)
    sys.stderr.flush()
    os._exit(0 if served else EXIT_FAILED)  # device threads of a failed engine must not hold the process


if __name__ == "__main__":
    from gapless.engine.build import build_core

    run(build_core)
