"""One way to wait for a state of threads, processes or servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for a condition; return its value. The bound guards against a hang alone."""
    late = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < late, "it did not come to hold"
        time.sleep(0.0005)
    return found
