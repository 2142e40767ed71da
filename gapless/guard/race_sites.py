"""Where in user code something happened: cheap to take at every access, turned into lines only for a report."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType

import torch

from gapless.guard.sites import Frame

_GUARD = Path(__file__).parent
_OURS_AND_TORCH = (str(_GUARD), str(_GUARD.parent / "device"), str(Path(torch.__file__).parent))
_HIDDEN = (*_OURS_AND_TORCH, *{sysconfig.get_path(k) for k in ("stdlib", "platstdlib")})
_SITE_PACKAGES = tuple(sysconfig.get_path(k) for k in ("purelib", "platlib"))
_RUNNERS = ("_pytest", "pytest", "pluggy")

KEPT = 6
"""User frames kept, the innermost first."""
WALKED = 40
"""Frames looked at before giving up."""


class Sites:
    """Stacks by number. The same stack has the same number."""

    def __init__(self, floor: CodeType) -> None:
        """Stacks end at a frame of `floor`: what lies below it belongs to somebody else."""
        self._floor = floor
        self._shown: dict[str, bool] = {}
        self._codes: dict[int, CodeType] = {}
        self._number: dict[tuple[int, ...], int] = {}
        self._stacks: list[tuple[int, ...]] = []

    def here(self, depth: int = 1) -> int:
        """The number of the caller's stack, `depth` frames up."""
        # The address of the code and the instruction: a line number costs a microsecond to find, so it waits.
        key: list[int] = []
        shown, floor = self._shown, self._floor
        frame, left = sys._getframe(depth), WALKED
        while left and len(key) < 2 * KEPT:
            code = frame.f_code
            if code is floor:
                break
            visible = shown.get(code.co_filename)
            if visible is None:
                visible = shown[code.co_filename] = _is_user(code.co_filename)
            if visible:
                number = id(code)
                if number not in self._codes:
                    self._codes[number] = code  # kept, so that the address stays its own
                key.append(number)
                key.append(frame.f_lasti)
            back = frame.f_back
            if back is None:
                break
            frame, left = back, left - 1
        return self._numbered(tuple(key))

    def _numbered(self, stack: tuple[int, ...]) -> int:
        number = self._number.get(stack)
        if number is None:
            number = self._number[stack] = len(self._stacks)
            self._stacks.append(stack)
        return number

    def frames(self, number: int) -> tuple[Frame, ...]:
        """The stack as text, innermost first."""
        stack = self._stacks[number]
        return tuple(_frame(self._codes[stack[i]], stack[i + 1]) for i in range(0, len(stack), 2))


def _is_user(file: str) -> bool:
    if file.startswith("<"):
        return file in ("<stdin>", "<string>")
    if file.startswith(_SITE_PACKAGES):
        return not file.startswith(_OURS_AND_TORCH) and not any(f"/{name}/" in file for name in _RUNNERS)
    return not file.startswith(_HIDDEN)


def _frame(code: CodeType, instruction: int) -> Frame:
    line = code.co_firstlineno
    for low, high, number in code.co_lines():
        if low <= instruction < high and number is not None:
            line = number
    return Frame(code.co_filename, line, code.co_qualname)
