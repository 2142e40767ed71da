"""Connects devices of a project's own with the checkers: a hook is where such devices report what they enqueue.

CUDA streams need none of this: the checkers wrap torch's own classes.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Hook(Protocol):
    """What a project offers, such as a module with these two functions."""

    def add(self, observer: Any, /) -> None:
        """Report to `observer` from now on, by the methods of `race_device.DeviceWatch`."""
        ...

    def remove(self, observer: Any, /) -> None:
        """Stop reporting to `observer`."""
        ...


_lock = threading.Lock()
_hooks: list[Hook] = []
_observers: list[Any] = []


def connect(hook: Hook) -> None:
    """Have every checker that is on now, or is switched on later, observe this hook. A second call does nothing."""
    with _lock:
        if hook not in _hooks:
            _hooks.append(hook)
            for observer in _observers:
                hook.add(observer)


def observe(observer: Any) -> None:
    """Register a checker's observer with every hook that is connected, now or later."""
    with _lock:
        _observers.append(observer)
        for hook in _hooks:
            hook.add(observer)


def forget(observer: Any) -> None:
    """Take the observer back from every hook."""
    with _lock:
        _observers.remove(observer)
        for hook in _hooks:
            hook.remove(observer)
