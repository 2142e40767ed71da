"""The program that `gapless san` starts: guard's runner, with the devices of this package connected to it."""

from __future__ import annotations

import sys

from gapless.engine import checkers
from gapless.guard import run

if __name__ == "__main__":
    checkers.connect()
    sys.exit(run.main())
