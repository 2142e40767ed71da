"""Connects a project's own devices with the checkers: such a device reports its operations to a hook.

CUDA streams need none of this: the checkers wrap torch's own classes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import forks

_lock = forks.lock()
_hooks: list[Any] = []
_observers: list[Any] = []
hidden: list[str] = []
"""Folders and files that implement connected devices; their lines are left out of the stacks of races."""


def connect(hook: Any, *places: str | Path) -> None:
    """Have every checker that is on now, or is switched on later, observe this hook. A second call does nothing.

    A hook is where devices report, such as a module with two functions: `add(observer)` has them report to `observer`
    by the methods of `race_device.DeviceWatch`, until `remove(observer)`.
    `places` are the folders and files that implement the devices; races are reported at the lines that call them.
    """
    with _lock:
        if hook not in _hooks:
            _hooks.append(hook)
            hidden.extend(os.path.join(place, "") if os.path.isdir(place) else str(place) for place in places)
            for observer in _observers:
                hook.add(observer)


@contextmanager
def observed_by(observer: Any) -> Iterator[None]:
    """Register a checker's observer with every hook that is connected, now or later, until the context is left."""
    with _lock:
        _observers.append(observer)
        for hook in _hooks:
            hook.add(observer)
    try:
        yield
    finally:
        with _lock:
            _observers.remove(observer)
            for hook in _hooks:
                hook.remove(observer)
