"""Sees hand-overs between threads that need no lock: deques, event loops, pipes, pairs of sockets, and zmq's inproc."""

from __future__ import annotations

import asyncio
import collections
import copyreg
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, Protocol

from .patches import Patches, StandInType

_REAL_DEQUE: Any = collections.deque
_THREADS: dict[int, threading.Thread] = vars(threading)["_active"]


class Orders(Protocol):
    """Orders what one thread did before a release after another's later acquisition of the same key."""

    def release(self, key: object) -> None: ...

    def acquire(self, key: object) -> None: ...


class _Token:
    """Carries the order of one hand-over, or of one channel."""

    __slots__ = ("__weakref__",)


def install(orders: Orders, patches: Patches) -> None:
    """Follow hand-overs until the patches are closed."""
    patches.put(collections, "deque", _deque_for(orders))
    copyreg.pickle(_REAL_DEQUE, _reduced)
    patches.callback(copyreg.dispatch_table.pop, _REAL_DEQUE, None)
    _follow_loops(orders, patches)
    channels = _Channels(orders)
    channels.install(patches)
    _when_imported("zmq.sugar.socket", partial(_Inproc(orders).install, patches), patches)


# Deques.


def _deque_for(orders: Orders) -> type:
    """Return the class that stands for `collections.deque`: putting an item comes before taking it."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = _REAL_DEQUE.__new__(cls, *args, **kwargs)
        made._order = _Token()
        return made

    def putting(original: Any) -> Any:
        def put(self: Any, *args: Any) -> Any:
            if len(_THREADS) > 1:  # a thread that starts later comes after it
                orders.release(self._order)
            return original(self, *args)

        return put

    def taking(original: Any) -> Any:
        def take(self: Any, *args: Any) -> Any:
            taken = original(self, *args)
            orders.acquire(self._order)
            return taken

        return take

    puts = ("append", "appendleft", "extend", "extendleft", "insert", "__iadd__", "__setitem__")
    takes = ("pop", "popleft", "__getitem__", "__iter__")
    methods = {
        "__slots__": ("_order",), "__module__": "collections", "__doc__": _REAL_DEQUE.__doc__,
        "_stands_for": _REAL_DEQUE, "__new__": new, "__reduce_ex__": _reduce_ex, "__getstate__": _state,
        **{name: putting(getattr(_REAL_DEQUE, name)) for name in puts},
        **{name: taking(getattr(_REAL_DEQUE, name)) for name in takes},
    }  # fmt: skip
    return StandInType("deque", (_REAL_DEQUE,), methods)


def _reduced(deque: Any) -> tuple[Any, ...]:
    """Return what pickle stores of a deque: the class by its name, whichever stands there."""
    return collections.deque, () if deque.maxlen is None else ((), deque.maxlen), None, iter(deque)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    return _reduced(self) if "_stands_for" in vars(type(self)) else _REAL_DEQUE.__reduce_ex__(self, protocol)


def _state(self: Any) -> Any:
    """Return the attributes of a class derived from it, as if it had no `_order`."""
    state: Any = object.__getstate__(self)
    if not isinstance(state, tuple):
        return state
    slots = {name: value for name, value in state[1].items() if name != "_order"}
    return (state[0], slots) if slots else state[0]


# Event loops.


def _follow_loops(orders: Orders, patches: Patches) -> None:
    """Wrap `call_soon_threadsafe` of the classes of loops, and of each class that is made meanwhile."""
    base, name = asyncio.AbstractEventLoop, "call_soon_threadsafe"

    def run(token: _Token, callback: Callable[..., Any], *args: Any) -> Any:
        orders.acquire(token)
        return callback(*args)

    def soon(original: Any, loop: Any, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = _Token()
        orders.release(token)
        return original(loop, partial(run, token, callback), *args, **kwargs)

    def follow(cls: Any) -> None:
        owner = next(one for one in cls.__mro__ if name in vars(one))
        # The method of another loop has been wrapped there.
        if owner is cls or not issubclass(owner, base):
            patches.wrap(cls, name, soon)

    waiting: list[Any] = base.__subclasses__()
    while waiting:
        one = waiting.pop()
        follow(one)
        waiting += one.__subclasses__()
    patches.put(base, "__init_subclass__", classmethod(follow))


# Pipes and pairs of sockets.


class _Channels:
    """Channels with both ends in this process: sending comes before receiving."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._sends: dict[int, tuple[_Token, int]] = {}
        self._receives: dict[int, tuple[_Token, int]] = {}
        """Channels by the descriptors of their two ends, each with its inode: closed descriptors are used again."""

    def install(self, patches: Patches) -> None:
        for name in ("pipe", "pipe2"):
            if hasattr(os, name):
                patches.wrap(os, name, self._piped)
        patches.wrap(socket, "socketpair", self._paired)
        ends: list[tuple[Any, tuple[str, ...], tuple[str, ...], Callable[[Any], int]]] = [
            (os, ("write",), ("read",), int),
            (socket.socket, ("send", "sendall", "sendmsg"), ("recv", "recv_into", "recvmsg"), lambda end: end.fileno()),
        ]
        connection: Any = sys.modules.get("multiprocessing.connection")
        if connection is not None:
            ends.append((connection.Connection, ("_send_bytes",), ("_recv_bytes",), lambda end: end._handle))
        for owner, sending, receiving, number in ends:
            for name in sending:
                patches.wrap(owner, name, partial(self._sent, number))
            for name in receiving:
                patches.wrap(owner, name, partial(self._received, number))

    def _join(self, sends: int, receives: int) -> None:
        token = _Token()
        self._sends[sends] = token, _inode(sends)
        self._receives[receives] = token, _inode(receives)

    def _piped(self, original: Any, *args: Any) -> Any:
        ends = original(*args)
        self._join(ends[1], ends[0])
        return ends

    def _paired(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        ends = original(*args, **kwargs)
        one, other = (end.fileno() for end in ends)
        self._join(one, other)
        self._join(other, one)
        return ends

    def _sent(self, number: Callable[[Any], int], original: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
        token = _found(self._sends, number(end))
        if token is not None:
            self._orders.release(token)
        return original(end, *args, **kwargs)

    def _received(self, number: Callable[[Any], int], original: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
        token = _found(self._receives, number(end))
        received = original(end, *args, **kwargs)
        if token is not None and received:
            self._orders.acquire(token)
        return received


def _found(ends: dict[int, tuple[_Token, int]], number: int) -> _Token | None:
    """Return the token of a channel's end, and forget an end whose descriptor belongs to another file."""
    token, inode = ends.get(number, (None, 0))
    if token is not None and inode != _inode(number):
        ends.pop(number, None)
        return None
    return token


def _inode(number: int) -> int:
    """Return which file a descriptor belongs to, or 0 if it is closed."""
    try:
        return os.fstat(number).st_ino
    except OSError:
        return 0


# zmq.


class _Inproc:
    """Sockets of zmq that are joined by an `inproc://` address: sending comes before receiving."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._addresses: dict[str, _Token] = {}
        self._of_sockets: dict[int, list[_Token]] = {}
        """The addresses of each socket of zmq's own, which several Python objects may share."""

    def install(self, patches: Patches, module: Any) -> None:
        for name, around in (
            ("bind", self._joined), ("connect", self._joined), ("send", self._sent), ("recv", self._received)
        ):  # fmt: skip
            patches.wrap(module.Socket, name, around)

    def _joined(self, original: Any, end: Any, address: Any) -> Any:
        if isinstance(address, str) and address.startswith("inproc:"):
            token = self._addresses.setdefault(address, _Token())
            self._of_sockets.setdefault(end.underlying, []).append(token)
        return original(end, address)

    def _sent(self, original: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
        for token in self._of_sockets.get(end.underlying, ()):
            self._orders.release(token)
        return original(end, *args, **kwargs)

    def _received(self, original: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
        received = original(end, *args, **kwargs)
        for token in self._of_sockets.get(end.underlying, ()):
            self._orders.acquire(token)
        return received


class _Importing:
    """Finds one module as all others do, and calls `then` with it once it has run."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then
        self._searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(name)
        finally:
            self._searching = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module
            loader.exec_module = lambda module: (run(module), self._then(module))[0]
        return spec


def _when_imported(name: str, then: Callable[[Any], None], patches: Patches) -> None:
    """Call `then` with this module: at once if it has been imported, or when it is."""
    if name in sys.modules:
        then(sys.modules[name])
        return
    finder: Any = _Importing(name, then)
    sys.meta_path.insert(0, finder)
    patches.callback(sys.meta_path.remove, finder)
