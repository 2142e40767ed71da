"""Engines in child processes of the tests are checked as those of the tests' own process are.

tests/conftest.py puts this folder on PYTHONPATH, so every Python that a test starts imports this file first. It does
nothing until the process builds an engine; then it watches the steps, and writes what it finds into the folder
STEPS_UNDER_GUARD, where the test's process looks.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

ENGINE = "gapless.loop.build"
FOLDER = os.environ.get("STEPS_UNDER_GUARD")
PLANTED = os.environ.get("STEPS_PLANTED_SYNC")
"""A test plants a host read in the step of its child, to see that it is found."""


class _Watch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands before the loader of one module, and has `guard_steps` run when that is loaded."""

    def find_spec(self, name, path, target=None):
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        guard_steps()


def guard_steps():
    sys.path.append(str(Path(__file__).parents[1]))
    try:
        import guarded_children
    finally:
        sys.path.pop()
    from gapless.base import observe

    observe.watch_steps(guarded_children.InChild(Path(FOLDER)))
    if PLANTED:
        guarded_children.plant_a_sync()


if FOLDER:
    sys.meta_path.insert(0, _Watch())
