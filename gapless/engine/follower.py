"""The process of a following rank. `python -m gapless.engine.follower RANK WORLD SOCKET`.

SOCKET is the number of the inherited socket to the leader. The end of stdin means that the leader has died, and the
process exits. It writes to stderr alone.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from gapless.engine.life import EXIT_FAILED, follow_parent


def run(follow: Callable[[int, int, int], bool]) -> NoReturn:
    """Run the rank's process until its leader stops it, or it has failed."""
    for ignored in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)  # the leader decides
    faulthandler.enable()
    os.dup2(2, 1)
    follow_parent()
    followed = follow(*map(int, sys.argv[1:4]))
    sys.stderr.flush()
    os._exit(0 if followed else EXIT_FAILED)


def main(rank: int, world: int, socket: int) -> bool:
    # Imported only now, so that the watch over the leader covers the seconds of these imports.
    from gapless.engine.follower_loop import follow

    return follow(rank, world, socket)


if __name__ == "__main__":
    run(main)
