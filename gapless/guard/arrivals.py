"""Runs functions on modules that a program imports later, or has imported already."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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
        if arrived is None:
            return None
        # Finders after this one alone: others of this class may be there too, each for functions of its own.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((spec for one in others if (spec := one.find_spec(name, path, target)) is not None), None)
        loader: Any = spec.loader if spec else None
        if loader is None:
            return None
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
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
