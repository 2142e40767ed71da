"""Sees orders between host threads, while a checker is on: start and join, events, conditions, locks, queues."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from . import forks, threads
from .patches import Patches
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
        wrap = patches.wrap
        patches.enter_context(threads.starting_inside(self._started))
        wrap(threading.Thread, "join", self._join)
        wrap(threading.Event, "set", self._set)
        wrap(threading.Event, "wait", self._event_seen)
        wrap(threading.Event, "is_set", self._event_seen)
        wrap(threading.Condition, "__enter__", self._enter_condition)
        wrap(threading.Condition, "__exit__", self._exit_condition)
        wrap(threading.Condition, "wait", self._wait_condition)
        patches.put(threading, "Lock", lambda: _Lock(self, _REAL_LOCK()))
        patches.put(threading, "RLock", lambda: _RLock(self, _REAL_RLOCK()))
        patches.put(queue, "SimpleQueue", lambda: _Queue(self))

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

    def _join(self, original: Any, thread: threading.Thread, timeout: float | None = None) -> None:
        original(thread, timeout)
        if not thread.is_alive():
            self.acquire(thread)

    # Events and conditions.

    def _set(self, original: Any, event: threading.Event) -> None:
        self.release(event)
        original(event)

    def _event_seen(self, original: Any, event: threading.Event, *args: Any, **kwargs: Any) -> bool:
        seen = bool(original(event, *args, **kwargs))
        if seen:
            self.acquire(event)
        return seen

    def _enter_condition(self, original: Any, condition: Any) -> Any:
        entered = original(condition)
        self.acquire(condition._lock)
        return entered

    def _exit_condition(self, original: Any, condition: Any, *error: Any) -> Any:
        self.release(condition._lock)
        return original(condition, *error)

    def _wait_condition(self, original: Any, condition: Any, timeout: float | None = None) -> bool:
        self.release(condition._lock)
        woken = bool(original(condition, timeout))
        self.acquire(condition._lock)
        return woken


_REAL_LOCK: Any = threading.Lock
_REAL_RLOCK: Any = threading.RLock


class _Lock:
    """A lock whose release comes before its next acquisition."""

    def __init__(self, watch: ThreadWatch, real: Any) -> None:
        self._watch = watch
        self._real = real

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

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _RLock(_Lock):
    """A re-entrant lock, with what a condition asks of it."""

    def _release_save(self) -> Any:
        self._watch.release(self)
        return self._real._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._real._acquire_restore(state)
        self._watch.acquire(self)


class _Queue(queue.SimpleQueue[Any]):
    """A simple queue whose puts come before its later gets."""

    _watch: ThreadWatch

    def __new__(cls, watch: ThreadWatch) -> _Queue:
        self = super().__new__(cls)
        self._watch = watch
        return self

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
