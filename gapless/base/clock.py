"""Time as an argument, so that a simulation can own it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Returns nanoseconds from an arbitrary start; never goes back."""

monotonic: Clock = time.monotonic_ns
