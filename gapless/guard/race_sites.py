"""Numbers the stacks of accesses: cheap enough for every operator, and turned into lines only for a report."""

from __future__ import annotations

import itertools
import sys
from types import CodeType
from typing import Any, NamedTuple

from . import hooks
from .sites import Finder, Frame

FRAMES_KEPT = 6
"""How many of the user's frames a stack holds, from the innermost one on."""


class Label(NamedTuple):
    """The program that a stream ran, and the number of the stack that launched it. Host threads have an empty one."""

    program: str = ""
    launched: int = -1


NO_PROGRAM = Label()


class Sites:
    """Stacks by number, each with the label of who was there. The same stack and label have the same number."""

    def __init__(self, floor: CodeType) -> None:
        """Take stacks that end at a frame of `floor`; what is below it is not the program."""
        self._finder = Finder(FRAMES_KEPT, hooks.hidden, floor)
        self._take = self._finder.take
        self._number: dict[tuple[Any, ...], int] = {}
        self._stacks: dict[int, tuple[Any, ...]] = {}
        self._next = itertools.count()

    def here(self, depth: int = 1, label: Label = NO_PROGRAM) -> int:
        """The number of the caller's stack, `depth` frames up."""
        stack = self._take(sys._getframe(depth), label)
        number = self._number.get(stack)
        return self._add(stack) if number is None else number

    def _add(self, stack: tuple[Any, ...]) -> int:
        # Any thread may be here: one of them gives the number, and every number that can be found has its stack.
        number = next(self._next)
        self._stacks[number] = stack
        return self._number.setdefault(stack, number)

    def label_of(self, number: int) -> Label:
        label: Label = self._stacks[number][0]
        return label

    def stack(self, number: int) -> tuple[Any, ...]:
        """Return the stack without its label, for comparisons."""
        return self._stacks[number][1:]

    def frames(self, number: int) -> tuple[Frame, ...]:
        """The stack as text, innermost first."""
        return self._finder.frames(self._stacks[number])
