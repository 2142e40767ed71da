"""Keeps the checkers usable in a forked child: of all threads only the forking one is left."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
in_child: list[Callable[[], None]] = []
"""Functions that are called in every child that is forked."""
forking: set[int] = set()
"""The idents of threads within a fork: in the child Python's own hooks come first, when no lock is known to be free."""
# Taken now: while races are watched, `threading` makes locks of other classes.
_LOCK: Any = threading.RLock


def lock() -> threading.RLock:
    """Return a re-entrant lock that is free in a forked child, whichever thread of the parent held it."""
    made: threading.RLock = _LOCK()
    _locks.add(made)
    return made


def _begin_again() -> None:
    for held in list(_locks):
        held._at_fork_reinit()
    forking.clear()
    for hook in in_child:
        hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: forking.add(threading.get_ident()),
        after_in_parent=lambda: forking.discard(threading.get_ident()),
        after_in_child=_begin_again,
    )
