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

from gapless.engine.life import EXIT_FAILED, Control, ParentWatch, Pulse

if TYPE_CHECKING:
    from gapless.base.config import EngineConfig
    from gapless.engine.seam import Core


def main(socket: int, build: Callable[[EngineConfig], Core]) -> int:
    """Boot, then drive the core that `build` makes until the parent says stop. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent decides when to drain
    faulthandler.enable()
    parent = ParentWatch()
    control = Control()
    pulse = Pulse(control)
    # Imported only now, so that the watch over the parent covers the seconds that these imports take.
    from gapless.engine.worker_loop import serve

    return 0 if serve(socket, parent, control, pulse, build) else EXIT_FAILED


def run(build: Callable[[EngineConfig], Core]) -> NoReturn:
    """Be the engine's process; the first argument of the command line is the socket's number."""
    code = main(int(sys.argv[1]), build)
    sys.stderr.flush()
    os._exit(code)  # device threads of a failed engine must not hold the process


if __name__ == "__main__":
    from gapless.engine.build import build_core

    run(build_core)
