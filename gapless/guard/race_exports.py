"""Sees what takes the memory of arrays through the buffer protocol: hashes, files, sockets, `bytes`, `memoryview`."""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

Noted = Callable[[Any, bool], None]
"""Takes an array whose memory is given out, and whether it may be written."""

_WRITABLE = 1
HAS_METHOD = sys.version_info >= (3, 12)
"""Whether classes may define `__buffer__`. Where they may not, no function in its place can raise an error."""
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_BUFFER_SLOTS_AT = object.__basicsize__ + _POINTER * 18
"""The place in a type of the address of its buffer functions; the first gives memory out."""
_TYPE: Any = type
_GiveOut: Any = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)


def note_exports(kind: type[Any], noted: Noted) -> None:
    """Have `noted` called whenever memory of an array of this kind, a subclass of numpy's, is given out."""
    if HAS_METHOD:
        _define(kind, noted)
    else:
        _replace(kind, noted)


def _define(kind: Any, noted: Noted) -> None:
    given: Any = np.ndarray

    def __buffer__(self: Any, flags: int) -> memoryview:
        view: memoryview = given.__buffer__(self, flags)
        noted(self, bool(flags & _WRITABLE))
        return view

    kind.__buffer__ = __buffer__


def _replace(kind: Any, noted: Noted) -> None:
    """Put a function in the place of the one that `kind` inherits. Without the expected layout nothing is done."""
    slots, inherited = _slots(kind), _slots(np.ndarray)
    if slots is None or inherited is None or not id(kind) < slots < id(kind) + _TYPE.__basicsize__:
        return
    slot = ctypes.c_void_p.from_address(slots)
    original = ctypes.c_void_p.from_address(inherited).value
    if original is None or slot.value != original:
        return
    give_out = _GiveOut(original)

    def given_out(array: Any, view: int, flags: int) -> int:
        # No exception may leave this: C code would use a buffer that was never filled in.
        answer = -1
        with suppress(BaseException):
            answer = int(give_out(array, view, flags))
            noted(array, bool(flags & _WRITABLE))
        return answer

    kept[kind] = _GiveOut(given_out)
    slot.value = ctypes.cast(kept[kind], ctypes.c_void_p).value
    # Python's functions end before its objects do.
    atexit.register(setattr, slot, "value", original)


kept: dict[type[Any], Any] = {}
"""The functions that C code calls; they must never die."""


def _slots(kind: Any) -> int | None:
    return ctypes.c_void_p.from_address(id(kind) + _BUFFER_SLOTS_AT).value
