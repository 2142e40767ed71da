"""Sees orders between host threads, while a checker is on: start and join, events, conditions, locks, queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from . import forks, race_handovers, threads
from .patches import Patches, StandInType
from .race_checker import RaceChecker
from .race_mode import mode


class ThreadWatch:
    """Wraps `threading` while the checker is active.

    Locks and simple queues are C objects that cannot be wrapped, so those made meanwhile are made of other classes.
    A lock that was there before orders nothing for the checker, unless a condition or a queue.Queue holds it.
    """

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._agents = checker.agents

    def install(self, patches: Patches) -> None:
        patches.enter_context(threads.starting_inside(self._started))
        for owner, name, key in _RELEASING:
            patches.wrap(owner, name, partial(self._releasing, key))
        for owner, name, key in _ACQUIRING:
            patches.wrap(owner, name, partial(self._acquiring, key))
        for module, name, base, real in _MADE_MEANWHILE:
            members = {"_watch": self, "_stands_for": real, "__module__": module.__name__}
            patches.put(module, name, StandInType(name, (base,), members))
        race_handovers.install(self, patches)

    def release(self, key: object) -> None:
        if self._follows():
            self._agents.release(key)

    def acquire(self, key: object) -> None:
        if self._follows():
            self._agents.acquire(key)

    def _follows(self) -> bool:
        if not self._checker.active or threading.get_ident() in forks.forking:
            return False
        return self._agents.known_thread()

    # Threads.

    def _started(self, thread: threading.Thread) -> AbstractContextManager[None]:
        # On the thread that starts it, now: what that thread does later does not come before the new one.
        self._agents.starting(thread)
        return self._watched(thread)

    @contextmanager
    def _watched(self, thread: threading.Thread) -> Iterator[None]:
        try:
            with mode(self._checker):
                yield
        finally:
            self._agents.release(thread)

    def _releasing(self, key: Callable[..., object], original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        self.release(key(owner))
        return original(owner, *args, **kwargs)

    def _acquiring(self, key: Callable[..., object], original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(owner, *args, **kwargs)
        known = key(owner, result)
        if known is not None:
            self.acquire(known)
        return result


_RELEASING: tuple[tuple[type, str, Callable[..., object]], ...] = (
    (threading.Event, "set", lambda event: event),
    (threading.Condition, "__exit__", lambda condition: condition._lock),
    (threading.Condition, "wait", lambda condition: condition._lock),
)
"""Methods that release the caller's clock to others, each with a function to the object that carries it."""
_ACQUIRING: tuple[tuple[type, str, Callable[..., object]], ...] = (
    (threading.Thread, "join", lambda thread, _: None if thread.is_alive() else thread),
    (threading.Event, "wait", lambda event, seen: event if seen else None),
    (threading.Event, "is_set", lambda event, seen: event if seen else None),
    (threading.Condition, "__enter__", lambda condition, _: condition._lock),
    (threading.Condition, "wait", lambda condition, _: condition._lock),
)
"""Methods that merge others' clocks into the caller's, each with a function to the carrying object, or to None."""

_REAL_LOCK: Any = threading.Lock
_REAL_RLOCK: Any = threading.RLock


class _Lock:
    """A lock whose release comes before its next acquisition."""

    _watch: ThreadWatch
    _make: Any = staticmethod(_REAL_LOCK)
    __class__: Any = property(lambda lock: type(lock._real))
    """The real class, of which this is an instance too."""

    def __init__(self) -> None:
        self._real = self._make()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._real.acquire(blocking, timeout))
        if taken:
            self._watch.acquire(self)
        return taken

    def release(self) -> None:
        self._watch.release(self)
        self._real.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._real.__reduce_ex__(protocol)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _RLock(_Lock):
    """A re-entrant lock, with what a condition asks of it."""

    _make = staticmethod(_REAL_RLOCK)

    def _release_save(self) -> Any:
        self._watch.release(self)
        return self._real._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._real._acquire_restore(state)
        self._watch.acquire(self)


class _Queue(queue.SimpleQueue[Any]):
    """A simple queue whose puts come before its later gets."""

    _watch: ThreadWatch

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._watch.release(self)
        super().put(item, block, timeout)

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        self._watch.acquire(self)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)


_MADE_MEANWHILE: tuple[tuple[Any, str, type, type], ...] = (
    (threading, "Lock", _Lock, type(_REAL_LOCK())),
    (threading, "RLock", _RLock, type(_REAL_RLOCK())),
    (queue, "SimpleQueue", _Queue, queue.SimpleQueue),
)
"""Classes of modules, each with the one that stands for it and with the type of its real instances."""
