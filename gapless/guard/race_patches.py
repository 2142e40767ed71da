"""Methods replaced for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """Replaces attributes and puts them back, last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`, until `undo`."""
        own = name in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Calls of `owner.name(*args)` become `around(original, *args)`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self.put(owner, name, wrapped)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
