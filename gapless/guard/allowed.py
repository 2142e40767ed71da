"""Functions of the program that allow the host to wait, by their dotted names, such as vLLM's `gpu_sync_allowed`.

A name is that of a function, a class or an object: waits are allowed while a context manager that it makes is entered,
in functions that it decorates, and while it runs itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import torch

from .arrivals import arriving
from .patches import Patches
from .sync import allow
from .watch import ALLOWANCES, Allowance, begin_allowance


@contextmanager
def allowing(names: Mapping[str, str]) -> Iterator[None]:
    """Allow waits in these functions, each for its reason. They are replaced in modules that are imported meanwhile."""
    with Patches() as patches:
        replacements = _Replacements(names, patches)
        parts = [name.split(".") for name in names]
        modules = {".".join(words[:end]) for words in parts for end in range(1, len(words))}
        patches.enter_context(arriving(dict.fromkeys(modules, replacements.arrived)))
        yield


class _Replacements:
    """Replaces the functions at the end of the import of their module, before another one can take them from there."""

    def __init__(self, names: Mapping[str, str], patches: Patches) -> None:
        self._names, self._patches = names, patches
        self._done: dict[str, Any] = {}
        """The replacements that have been made, by name."""

    def arrived(self, module: ModuleType) -> None:
        """Replace the functions that this module has."""
        for name in self._names:
            if not name.startswith(f"{module.__name__}."):
                continue
            place, _, last = name.removeprefix(f"{module.__name__}.").rpartition(".")
            try:
                owner = attrgetter(place)(module) if place else module
                original = inspect.getattr_static(owner, last, getattr(owner, last))
            except AttributeError:
                continue  # it is in a module below, which comes later
            if self._done.get(name) is not original:
                self._replace(owner, last, original, name)
                self._done[name] = inspect.getattr_static(owner, last)

    def _replace(self, owner: Any, last: str, original: Any, name: str) -> None:
        reason = self._names[name]
        try:
            if isinstance(original, type):
                for method, value in _methods(original, reason).items():
                    self._patches.put(original, method, value)
            else:
                self._patches.put(owner, last, _allowed(original, reason))
        except TypeError as error:
            kind = f"the class {original.__name__}" if isinstance(original, type) else f"a {type(original).__name__}"
            raise ValueError(f"allow {name}: {kind} cannot be allowed: {error}") from error


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, WrapperDescriptorType)
_MORE = ("__iter__", "__getitem__", "__len__", "__await__", "__get__")
"""Methods that `_Allowed` does not pass on."""


def _allowed(original: Any, reason: str) -> Any:
    """Return what replaces a function or an object. Raises TypeError where nothing can."""
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(_allowed(original.__func__, reason))
    if inspect.isgeneratorfunction(original) or inspect.isasyncgenfunction(original):
        raise TypeError("it is a generator")
    if isinstance(original, _FUNCTIONS):
        return _around(original, reason)
    if _is_plain(original) and (callable(original) or _is_manager(original)):
        return _Allowed(original, reason)
    raise TypeError("name a function, a class or a context manager")


def _is_plain(thing: Any) -> bool:
    return not (isinstance(thing, torch.Stream) or any([hasattr(type(thing), name) for name in _MORE]))


def _is_manager(thing: Any) -> bool:
    return hasattr(type(thing), "__enter__") or hasattr(type(thing), "__aenter__")


def _around(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return the function with waits allowed inside, and in its results."""

    @functools.wraps(function)
    async def wait(*args: Any, **kwargs: Any) -> Any:
        with allow(reason):
            return await function(*args, **kwargs)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with allow(reason):
            made = function(*args, **kwargs)
        return _made(made, reason)

    return wait if inspect.iscoroutinefunction(function) else run


def _made(made: Any, reason: str) -> Any:
    if inspect.iscoroutine(made):
        return _awaited(made, reason)
    if isinstance(made, FunctionType):
        return _around(made, reason)
    return _Allowed(made, reason) if _is_manager(made) and _is_plain(made) else made


async def _awaited(coroutine: Any, reason: str) -> Any:
    with allow(reason):
        return await coroutine


_open: list[Allowance] = []
"""The sections of context managers that are entered."""


@contextmanager
def _beginning(by: object, reason: str) -> Iterator[None]:
    """Begin a section with the entering of a context manager, or only for it if that fails."""
    _open.append(begin_allowance(reason, by))
    try:
        yield
    except BaseException:
        _end(by)
        raise


@contextmanager
def _ending(by: object) -> Iterator[None]:
    try:
        yield
    finally:
        _end(by)


def _end(by: object) -> None:
    """End the last section of this context manager: of this task, if it has one."""
    here = ALLOWANCES.get()
    sections = sorted((one for one in _open if one.by is by), key=lambda one: one in here)
    if sections:
        _open.remove(sections[-1])
        sections[-1].watch = None


def _methods(cls: type, reason: str) -> dict[str, Any]:
    """Return the methods of a class that begin and end sections, to replace its own: its name stays its own."""
    names = ("__init__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__")
    own = {name: getattr(cls, name) for name in names if any([name in vars(base) for base in cls.__mro__])}
    found = {name: _around(own[name], reason) for name in names[:2] if isinstance(own.get(name), FunctionType)}
    if "__exit__" in own:
        found |= _sections(own["__enter__"], own["__exit__"], reason)
    if "__aexit__" in own:
        found |= _async_sections(own["__aenter__"], own["__aexit__"], reason)
    return found


def _sections(first: Any, last: Any, reason: str) -> dict[str, Any]:
    def enter(self: Any) -> Any:
        # A class below may end without ours.
        if type(self).__exit__ is not leave:
            return first(self)
        with _beginning(self, reason):
            return first(self)

    def leave(self: Any, *error: Any) -> Any:
        with _ending(self):
            return last(self, *error)

    return {"__enter__": enter, "__exit__": leave}


def _async_sections(first: Any, last: Any, reason: str) -> dict[str, Any]:
    async def enter(self: Any) -> Any:
        if type(self).__aexit__ is not leave:
            return await first(self)
        with _beginning(self, reason):
            return await first(self)

    async def leave(self: Any, *error: Any) -> Any:
        with _ending(self):
            return await last(self, *error)

    return {"__aenter__": enter, "__aexit__": leave}


class _Allowed:
    """Stands for an object of the program: a context manager, or what can be called, with waits allowed inside."""

    def __init__(self, inner: Any, reason: str) -> None:
        vars(self).update(_inner=inner, _reason=reason)

    def __enter__(self) -> Any:
        with _beginning(self, self._reason):
            return self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        with _ending(self):
            return self._inner.__exit__(*error)

    async def __aenter__(self) -> Any:
        with _beginning(self, self._reason):
            return await self._inner.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        with _ending(self):
            return await self._inner.__aexit__(*error)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with allow(self._reason):
            made = self._inner(*args, **kwargs)
        return _made(made, self._reason)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)
