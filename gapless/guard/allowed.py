"""Functions of the program that allow the host to wait, by their dotted names, such as vLLM's `gpu_sync_allowed`.

A name is that of a function, a class or an object: waits are allowed while a context manager that it makes is entered,
in functions that it decorates, and while it runs itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any

from .patches import Patches
from .sync import allow


@contextmanager
def allowing(names: Mapping[str, str]) -> Iterator[None]:
    """Allow waits in these functions, each for its reason. They are replaced in modules that are imported meanwhile."""
    with Patches() as patches:
        importer = _Importer(names, patches)
        for module in [sys.modules[name] for name in importer.modules if name in sys.modules]:
            importer.imported(module)
        if names:
            sys.meta_path.insert(0, importer)
            patches.callback(sys.meta_path.remove, importer)
        yield


class _Importer(MetaPathFinder):
    """Replaces the functions at the end of the import of their module, before another one can take them from there."""

    def __init__(self, names: Mapping[str, str], patches: Patches) -> None:
        self._names, self._patches = names, patches
        parts = [name.split(".") for name in names]
        self.modules = {".".join(words[:end]) for words in parts for end in range(1, len(words))}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.imported(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec

    def imported(self, module: ModuleType) -> None:
        """Replace the functions that this module has."""
        for name, reason in self._names.items():
            if not name.startswith(f"{module.__name__}."):
                continue
            place, _, last = name.removeprefix(f"{module.__name__}.").rpartition(".")
            try:
                owner = attrgetter(place)(module) if place else module
                original = getattr(owner, last)
            except AttributeError:
                continue  # it is in a module below, which comes later
            if not hasattr(original, "_gapless_reason"):
                self._patches.put(owner, last, _allowed(original, reason))


def _allowed(original: Any, reason: str) -> Any:
    if not callable(original) or hasattr(type(original), "__enter__"):
        return _Allowed(original, reason)
    called = _around(original, reason)

    @functools.wraps(original, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        made = called(*args, **kwargs)
        if hasattr(type(made), "__enter__"):
            return _Allowed(made, reason)
        return _around(made, reason) if callable(made) else made

    vars(make)["_gapless_reason"] = reason
    return make


def _around(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with allow(reason):
            return function(*args, **kwargs)

    return run


class _Allowed:
    """A context manager, or decorator, of the program, with waits allowed inside."""

    def __init__(self, inner: Any, reason: str) -> None:
        self._inner, self._gapless_reason = inner, reason
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Any:
        entered = self._inner.__enter__()
        allowed = allow(self._gapless_reason)
        allowed.__enter__()
        self._open.append(allowed)
        return entered

    def __exit__(self, *error: Any) -> Any:
        self._open.pop().__exit__(None, None, None)
        return self._inner.__exit__(*error)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _around(self._inner(function), self._gapless_reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
