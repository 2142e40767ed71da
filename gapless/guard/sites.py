"""Finds the user's code behind an event: the frames that belong neither to torch nor to this package.

A stack is taken raw, as code objects and instructions, which is cheap enough for every operator; those of accesses to
memory have numbers. Lines are looked up when a report needs them.
"""

from __future__ import annotations

import dis
import itertools
import os
import sys
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from . import hooks

FRAMES_KEPT = 40
"""Frames kept of the stack of a finding."""
ACCESS_FRAMES_KEPT = 6
"""Frames kept of the stack of an access to memory."""
_FRAMES_LOOKED_AT = range(200)
"""One item for each frame that is looked at before giving up."""

_HERE = os.path.dirname(__file__) + os.sep
_TYPED_IN = ("<stdin>", "<string>", "<doctest ")

_BELOW = (f"{os.sep}runpy.py", f"{os.sep}multiprocessing{os.sep}process.py")
"""Modules that run a program, or a child's part of it."""

HIDDEN, SHOWN_FRAMES, END_OF_STACK, STACK_FLOOR = range(4)
"""Kinds of frames: not the user's, the user's, the end of a stack that has begun, the end of any stack."""


class Frame(NamedTuple):
    """One line of the user's code."""

    file: str
    line: int
    function: str
    loop: int = 0
    """The line where the innermost loop around it begins, in the same function; 0 outside of loops."""

    @property
    def where(self) -> str:
        """`file:line`, relative to the root if it is below that."""
        return f"{shown(self.file)}:{self.line}"

    @property
    def is_users(self) -> bool:
        """Whether the line is the program's own, neither of Python nor of an installed package."""
        return not is_library(self.file)


UNKNOWN = Frame("<unknown>", 0, "?")


class Finder:
    """A taker of stacks with a memory of code objects. The same code has the same id while this lives."""

    def __init__(self, most: int, hidden: Sequence[str] = (), floor: CodeType | None = None) -> None:
        """Keep `most` frames of a stack, which ends at a frame of `floor`.

        `hidden` names further folders to leave out; more may be added to it later.
        """
        self._most = most
        self._hidden = hidden
        self._floor = floor
        self._kinds: dict[int, int] = {}
        self._codes: dict[int, CodeType] = {}

    def take(self, frame: FrameType | None, first: object = None) -> tuple[Any, ...]:
        """The stack from this frame on, innermost first: `first`, then the id of a code and an instruction by turns."""
        kinds, left = self._kinds, self._most
        found: list[Any] = [first]
        for _ in _FRAMES_LOOKED_AT:
            if frame is None:
                break
            number = id(frame.f_code)
            try:
                kind = kinds[number]
            except KeyError:
                kind = self._judge(frame.f_code)
            if kind:
                if kind == SHOWN_FRAMES:
                    found.append(number)
                    found.append(frame.f_lasti)
                    left -= 1
                    if not left:
                        break
                elif kind == STACK_FLOOR or len(found) > 1:
                    break
            frame = frame.f_back
        return tuple(found)

    def _judge(self, code: CodeType) -> int:
        # The code is kept first, so that no other code gets its id: another thread may look the kind up at once.
        self._codes[id(code)] = code
        kind = self._kinds[id(code)] = STACK_FLOOR if code is self._floor else _kind(code.co_filename, self._hidden)
        return kind

    def frames(self, stack: tuple[Any, ...]) -> tuple[Frame, ...]:
        """A stack that was taken, as text."""
        codes = [(self._codes[stack[i]], stack[i + 1]) for i in range(1, len(stack), 2)]
        return tuple(_frame(code, instruction, code.co_filename) for code, instruction in codes)


class Label(NamedTuple):
    """The program that a stream ran, and the number of the stack that launched it. Host threads have an empty one."""

    program: str = ""
    launched: int = -1


NO_PROGRAM = Label()


class Sites:
    """Stacks by number, each with its agent's label. The same stack and label have the same number."""

    def __init__(self, floor: CodeType) -> None:
        """Take stacks that end at a frame of `floor`; frames below it are not the program's."""
        self._finder = Finder(ACCESS_FRAMES_KEPT, hooks.hidden, floor)
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


_FINDER = Finder(FRAMES_KEPT)


def user_stack() -> tuple[Frame, ...]:
    """The user's frames, innermost first, at most FRAMES_KEPT of them."""
    return _FINDER.frames(_FINDER.take(sys._getframe(1)))


def caller() -> str:
    """The file of the first frame outside of this package, torch's own files included."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else UNKNOWN.file


def torchs_caller() -> str:
    """The outermost function of torch in this stack, as `torch.cuda.temperature`; empty if there is none."""
    name, frame = "", sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] == "torch":
            name = f"{module}.{frame.f_code.co_qualname}"
        elif name:
            break
    return name


@lru_cache(maxsize=1)
def root() -> Path:
    """Return the directory that files are named from: the working directory at the first call.

    A program may change to another one. The runners forget the directory at their start.
    """
    return Path.cwd()


def shown(file: str) -> str:
    """Return a file's name as a person would write it in the root; that of a library without its folder."""
    for folder in _PACKAGE_FOLDERS:
        if folder in file:
            return file.rpartition(folder)[2]
    try:
        return Path(file).relative_to(root()).as_posix()
    except ValueError:
        return file


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    return file.startswith((*_PACKAGES, *_LIBRARY, *_OURS_AND_TORCH)) or any(name in file for name in _PACKAGE_FOLDERS)


# Triton launches what the user's line calls, as torch does.
_TORCHS = [spec.submodule_search_locations for spec in map(find_spec, ("torch", "triton")) if spec is not None]
_OURS_AND_TORCH = (_HERE, *(os.path.join(place, "") for places in _TORCHS for place in places or ()))
_LIBRARY = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib")})
_PACKAGE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_RUNNERS = tuple(f"{folder}{name}{os.sep}" for folder in _PACKAGE_FOLDERS for name in ("_pytest", "pytest", "pluggy"))
_PACKAGES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib")})


def _kind(file: str, hidden: Sequence[str]) -> int:
    if file.startswith("<"):
        # Frames below the module runner or the test runner are not the user's program.
        return END_OF_STACK if file == "<frozen runpy>" else SHOWN_FRAMES if file.startswith(_TYPED_IN) else HIDDEN
    if any(name in file for name in _RUNNERS):
        return END_OF_STACK
    if file.startswith((*_OURS_AND_TORCH, *hidden)):
        return HIDDEN
    if file.startswith(_LIBRARY) and not file.startswith(_PACKAGES):
        return END_OF_STACK if file.endswith(_BELOW) else HIDDEN
    return SHOWN_FRAMES


@lru_cache(maxsize=1 << 16)
def _frame(code: CodeType, instruction: int, file: str) -> Frame:
    # The file is an argument since codes of two files may be equal.
    line = code.co_firstlineno
    for low, high, number in code.co_lines():
        if low <= instruction < high and number is not None:
            line = number
    inner = max((loop for loop in _loops(code) if loop[0] <= instruction <= loop[1]), default=None)
    return Frame(file, line, code.co_qualname, inner[2] if inner else 0)


@lru_cache(maxsize=4096)
def _loops(code: CodeType) -> tuple[tuple[int, int, int], ...]:
    """Return the loops of a function: the first and the last instruction of each, and the line of the first."""
    lines: dict[int, int] = {}
    ends: dict[int, int] = {}
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.positions.lineno or line if step.positions else line
        lines[step.offset] = line
        # Awaiting jumps back too, without an interrupt; that is no loop of the user's.
        if "JUMP_BACKWARD" in step.opname and "NO_INTERRUPT" not in step.opname:
            ends[step.argval] = max(step.offset, ends.get(step.argval, 0))
    return tuple((first, last, lines[first]) for first, last in ends.items())
