"""The engine's process. `python -m gapless.engine.worker SOCKET` reads its settings as one JSON line on stdin.

SOCKET is the number of the inherited message socket. After the first line, the end of stdin means that the parent has
died, and the process exits. Its stdout is a control pipe: an empty line each second is a heartbeat, a JSON line is a
Doing or a Died message. All other output goes to stderr.
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
    """Run the engine's process: boot, then drive the core made by `build` until the parent sends Stop."""
    for ignored in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)  # the parent decides when to drain
    faulthandler.enable()
    given = int(sys.argv[1])
    # A parent with a thousand connections gives a number beyond `select`'s. No child inherits the new one.
    number = os.dup(given)
    os.close(given)
    settings = read_settings()
    control = Control()
    pulse = Pulse(control)
    # Imported only now, so that the watch over the parent covers the seconds of these imports.
    from gapless.engine.worker_loop import serve

    served = serve(number, settings, control, pulse, build)
    sys.stderr.flush()
    os._exit(0 if served else EXIT_FAILED)  # device threads of a failed engine must not keep the process alive


if __name__ == "__main__":
    from gapless.engine.build import build_core

    run(build_core)
