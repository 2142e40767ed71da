"""Runs functions on modules that a program imports later, or has imported already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

OnArrival = Mapping[str, Callable[[Any], None]]


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and runs the function for each after it was executed."""

    def __init__(self, wanted: OnArrival) -> None:
        self._wanted = wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        arrived = self._wanted.get(name)
        spec = PathFinder.find_spec(name, path, target) if arrived else None
        loader: Any = spec.loader if spec else None
        if loader is None or arrived is None:
            return None
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            arrived(module)

        loader.exec_module = executed
        return spec


@contextmanager
def arriving(wanted: OnArrival) -> Iterator[None]:
    """Run each function on the module of its name: now if that is imported, else as soon as it is."""
    for name, arrived in wanted.items():
        if name in sys.modules:
            arrived(sys.modules[name])
    finder = _Finder(wanted)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
