"""Numbers the stacks of accesses: cheap enough for every operator, and turned into lines only for a report."""

from __future__ import annotations

import itertools
import sys
from types import CodeType
from typing import NamedTuple

from . import hooks
from .sites import Finder, Frame

FRAMES_KEPT = 6
"""How many of the user's frames a stack holds, from the innermost one on."""


class Label(NamedTuple):
    """The program that a stream ran, and the number of the stack that launched it. Host threads have an empty one."""

    program: str = ""
    launched: int = -1


class Sites:
    """Stacks by number, each with the label of who was there. The same stack and label have the same number."""

    def __init__(self, floor: CodeType) -> None:
        """Take stacks that end at a frame of `floor`; what is below it is not the program."""
        self._finder = Finder(FRAMES_KEPT, hooks.hidden, floor)
        self._take = self._finder.take
        self._labels: list[Label] = [Label()]
        self._number_of_label: dict[Label, int] = {Label(): 0}
        self._number: dict[tuple[int, ...], int] = {}
        self._stacks: dict[int, tuple[int, ...]] = {}
        self._next = itertools.count()

    def here(self, depth: int = 1, label: int = 0) -> int:
        """The number of the caller's stack, `depth` frames up."""
        stack = self._take(sys._getframe(depth), label)
        number = self._number.get(stack)
        return self._add(stack) if number is None else number

    def _add(self, stack: tuple[int, ...]) -> int:
        # Any thread may be here: one of them gives the number, and every number that can be found has its stack.
        number = next(self._next)
        self._stacks[number] = stack
        return self._number.setdefault(stack, number)

    def label(self, program: str, launched: int) -> int:
        """The number of a label. Not for two threads at once."""
        label = Label(program, launched)
        number = self._number_of_label.setdefault(label, len(self._labels))
        if number == len(self._labels):
            self._labels.append(label)
        return number

    def label_of(self, number: int) -> Label:
        return self._labels[self._stacks[number][0]]

    def stack(self, number: int) -> tuple[int, ...]:
        """Return the stack without its label, for comparisons."""
        return self._stacks[number][1:]

    def frames(self, number: int) -> tuple[Frame, ...]:
        """The stack as text, innermost first."""
        return self._finder.frames(self._stacks[number])
