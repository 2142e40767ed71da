"""Replaces attributes and methods for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any


class _StandIn:
    """A method that replaces another and is found in its place in every table that holds the other."""

    def __init__(self, original: Any, around: Callable[..., Any]) -> None:
        # First, since it copies the attributes of another stand-in too.
        functools.update_wrapper(self, original)
        self._original = original
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._original, *args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._original

    def __hash__(self) -> int:
        return hash(self._original)


class Patches(ExitStack):
    """Replaces attributes, and puts them back when it is closed, the last one first."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`, until the patches are closed."""
        own = name in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self.callback(setattr, owner, name, before) if own else self.callback(delattr, owner, name)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Turn calls of `owner.name(*args)` into calls of `around(original, *args)`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.put(owner, name, wrapped)

    def stand_in(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Wrap a method that function modes recognise by identity: the wrapper compares equal to it."""
        self.put(owner, name, _StandIn(getattr(owner, name), around))
