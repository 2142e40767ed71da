"""Replaces attributes and methods for a while."""

from __future__ import annotations

import ctypes
import functools
import gc
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from torch._C._dynamo import eval_frame as compiler

from . import forks


def leave_uncompiled(function: Any) -> None:
    """Have torch's compiler leave a function and its callees as they are. It costs nothing, other than its decorator.

    While a compiled function runs, every Python function that it comes to is compiled, a mode's too.
    """
    skips = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    compiler.set_code_exec_strategy(function.__code__, skips)


class _StandIn(functools.partial[Any]):
    """A method that replaces another and is found in its place in every table that holds the other."""

    __wrapped__: Any

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)


class StandInType(ABCMeta):
    """The type of a class that stands for another one, `_stands_for`, whose instances are its instances too.

    It is found in the other's place in tables. It is no plain type, so that a class may derive from one of these and
    be an abstract class at once.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        real = vars(cls).get("_stands_for")
        return (real is not None and isinstance(instance, real)) or super().__instancecheck__(instance)

    def __subclasscheck__(cls, other: type) -> bool:
        real = vars(cls).get("_stands_for")
        return (real is not None and issubclass(other, real)) or super().__subclasscheck__(other)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (other is not None and other is vars(cls).get("_stands_for"))

    def __hash__(cls) -> int:
        real = vars(cls).get("_stands_for")
        return super().__hash__() if real is None else hash(real)


@contextmanager
def holding(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values for a while."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


_IMMUTABLE = 1 << 8
"""The flag of classes that refuse to be changed, as all that C declares (Py_TPFLAGS_IMMUTABLETYPE)."""


def _set_in_c(owner: type, name: str, value: Any) -> None:
    """Change a method of a class of C, for its subclasses and for existing objects too."""
    (methods,) = gc.get_referents(vars(owner))
    methods[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # forgets earlier look-ups


class Patches(ExitStack):
    """Replaces attributes, and puts them back when it is closed, the last one first."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`, until the patches are closed. Raises TypeError for a class of C that is not torch's."""
        own = name in vars(owner)
        before = vars(owner).get(name)
        if own and isinstance(owner, type) and owner.__flags__ & _IMMUTABLE and owner.__module__.startswith("torch"):
            _set_in_c(owner, name, value)
            self.callback(_set_in_c, owner, name, before)
            return
        setattr(owner, name, value)
        self.callback(setattr, owner, name, before) if own else self.callback(delattr, owner, name)

    def hide(self, owner: Any, name: str) -> None:
        """Remove `owner.name`, until the patches are closed."""
        self.callback(setattr, owner, name, vars(owner)[name])
        delattr(owner, name)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Turn calls of `owner.name(*args)` into calls of `around(original, *args)`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.put(owner, name, wrapped)

    def stand_in(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Wrap a method that function modes recognise by identity: the wrapper compares equal to it."""
        original = getattr(owner, name)
        self.put(owner, name, functools.update_wrapper(_StandIn(around, original), original))


class SharedPatches:
    """Replaces attributes for the whole process, while at least one user holds this."""

    def __init__(self, install: Callable[[Patches], None]) -> None:
        self.lock = forks.lock()
        self._users = 0
        self._install = install
        self._patches = Patches()

    @contextmanager
    def held(self) -> Iterator[None]:
        with self.lock:
            if self._users == 0:
                self._install(self._patches)
            self._users += 1
        try:
            yield
        finally:
            with self.lock:
                self._users -= 1
                if self._users == 0:
                    self._patches.close()
