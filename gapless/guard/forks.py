"""Keeps the checkers usable in a forked child, where of all threads only the one that forked is left."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_hooks: list[Callable[[], None]] = []
forking: set[int] = set()
"""The idents of threads within a fork: in the child Python's own hooks come first, when no lock is known to be free."""
# Taken now: while races are watched, `threading` makes locks of other classes.
_LOCK: Any = threading.Lock
_RLOCK: Any = threading.RLock


def lock() -> threading.Lock:
    """Return a lock that is free in a forked child, whichever thread of the parent held it."""
    made: threading.Lock = _LOCK()
    _locks.add(made)
    return made


def rlock() -> threading.RLock:
    """Return a re-entrant lock that is free in a forked child."""
    made: threading.RLock = _RLOCK()
    _locks.add(made)
    return made


def add(hook: Callable[[], None]) -> None:
    """Call `hook` in every child that is forked from now on."""
    _hooks.append(hook)


def remove(hook: Callable[[], None]) -> None:
    _hooks.remove(hook)


def _before() -> None:
    forking.add(threading.get_ident())


def _after() -> None:
    forking.discard(threading.get_ident())


def _in_child() -> None:
    for held in list(_locks):
        held._at_fork_reinit()
    forking.clear()
    for hook in _hooks:
        hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)
