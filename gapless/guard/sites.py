"""Where in the user's code something happened: the frames of a stack that belong neither to torch nor to this room."""

from __future__ import annotations

import functools
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NamedTuple

DEPTH = 12
"""Frames kept of a stack."""

_HERE = os.path.dirname(__file__) + os.sep
_PLUMBING = ("<frozen ", "<string>", "<__array_function__")


class Frame(NamedTuple):
    """One line of the user's code."""

    file: str
    line: int
    function: str

    @property
    def where(self) -> str:
        """`file:line`, relative to the working directory where it lies below that."""
        return f"{shown(self.file)}:{self.line}"


UNKNOWN = Frame("<unknown>", 0, "?")


def user_stack(extra: tuple[str, ...] = ()) -> tuple[Frame, ...]:
    """The user's frames, innermost first, at most DEPTH of them; `extra` are further folders to leave out."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < DEPTH:
        name = frame.f_code.co_filename
        if not _is_ours(name) and not name.startswith(extra or "\0"):
            found.append(Frame(name, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return tuple(found)


def caller() -> str:
    """The file of the first frame outside of this room, torch's own files included."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else UNKNOWN.file


def shown(file: str) -> str:
    """A file's name as a person would write it here."""
    try:
        return Path(file).relative_to(Path.cwd()).as_posix()
    except ValueError:
        return file


@functools.lru_cache(maxsize=4096)
def _is_ours(file: str) -> bool:
    return file.startswith(_PLUMBING) or file.startswith(_skipped())


@functools.cache
def _skipped() -> tuple[str, ...]:
    """Torch, this room, and the parts of the standard library that only pass calls on."""
    spec = find_spec("torch")
    torch = [os.path.dirname(spec.origin) + os.sep] if spec and spec.origin else []
    library = os.path.dirname(os.__file__)
    names = ("contextlib", "functools", "runpy", "threading", "warnings")
    passing = [os.path.join(library, f"{name}.py") for name in names]
    return (*torch, _HERE, *passing)
