"""Reads and writes of host memory by other means than operators: pickles, storages, arrays of numpy over tensors.

Memory whose address alone is given away (`data_ptr`, `array.ctypes`, a capsule of DLPack) is not followed.
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import marks
from .patches import Patches
from .race_arrays import WatchedArray, arrays_in, plain, read, views_or_read, watched
from .race_checker import RaceChecker
from .race_report import READ, WRITE

_TENSORS = ("tolist", "__array__", "__reduce_ex__")
_STORAGES = {
    "__getitem__": READ, "__reduce__": READ, "_share_fd_cpu_": READ, "_share_filename_cpu_": READ,
    "__setitem__": WRITE, "fill_": WRITE, "byteswap": WRITE, "_set_from_file": WRITE,
}  # fmt: skip
"""Methods of storages with the access of each; the others use these, or ask."""
_MAKERS = (
    "array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "frombuffer", "from_dlpack", "require",
)  # fmt: skip
"""Functions of numpy that make an array of another, or of what gives out its memory."""
_FRAMES_OF_A_COPY = 24
"""The frames between `copy.copy` and the reduction that it asks of a tensor, with room."""


def install(checker: RaceChecker, patches: Patches) -> None:
    """Have the checker see them, until the patches are closed."""
    for name in _TENSORS:
        patches.stand_in(Tensor, name, partial(_read, checker))
    patches.stand_in(Tensor, "numpy", partial(_array, checker))
    if not checker.everything or checker.device is None:
        return
    for name in ("apply_", "map_", "map2_"):
        patches.stand_in(Tensor, name, partial(_mapped, checker))
    for name, kind in _STORAGES.items():
        patches.wrap(torch.UntypedStorage, name, partial(_storage_used, checker, kind))
    patches.wrap(torch.UntypedStorage, "copy_", partial(_storage_copied, checker))
    patches.stand_in(torch, "frombuffer", _tensor_over)
    for name in _MAKERS:
        patches.wrap(np, name, partial(_array_of, checker))
    patches.wrap(np.ctypeslib, "as_array", partial(_array_at, checker))


# Tensors.


def _array(checker: RaceChecker, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace `Tensor.numpy`: an array over pinned memory reads and writes when it is used."""
    if not _is_pinned(checker, tensor):
        return _read(checker, original, tensor, *args, **kwargs)
    return watched(original(tensor, *args, **kwargs), partial(checker.reach_part, tensor))


def _is_pinned(checker: RaceChecker, value: Any) -> bool:
    """Return whether a value is a tensor in pinned memory."""
    if not isinstance(value, Tensor):
        return False
    with marks.FunctionsOff():
        return checker.everything and checker.device is not None and checker.device.is_pinned(value)


def _read(checker: RaceChecker, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    with marks.FunctionsOff():
        if tensor.device.type == "cpu" and not (args and _copied_by_reference()):
            with checker.device.reading(tensor) if checker.device is not None else nullcontext():
                checker.reach(tensor, READ)
    return original(tensor, *args, **kwargs)


def _copied_by_reference() -> bool:
    """Return whether `copy.copy` asks: its reduction of a tensor holds the same memory, and does not read it."""
    frame: Any = sys._getframe(2)
    for _ in range(_FRAMES_OF_A_COPY):
        if frame is None or frame.f_code is copy.copy.__code__:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is copy.copy.__code__


def _mapped(checker: RaceChecker, original: Any, tensor: Tensor, *args: Any) -> Any:
    """Replace `apply_` and `map_`, which change each element by a function of Python's."""
    with marks.FunctionsOff():
        for other in args:
            if isinstance(other, Tensor):
                checker.reach(other, READ)
        checker.reach(tensor, WRITE)
    return original(tensor, *args)


# Storages.


def _storage_used(checker: RaceChecker, kind: int, original: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
    _reach_storage(checker, storage, kind)
    return original(storage, *args, **kwargs)


def _storage_copied(checker: RaceChecker, original: Any, storage: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    _reach_storage(checker, source, READ)
    _reach_storage(checker, storage, WRITE)
    return original(storage, source, *args, **kwargs)


def _reach_storage(checker: RaceChecker, storage: Any, kind: int) -> None:
    """Note an access to a storage of pinned memory."""
    storage = getattr(storage, "_untyped_storage", storage)
    if marks.place_of(storage).type != "cpu" or not checker.active:
        return
    whole = marks.whole(storage)
    with marks.FunctionsOff():
        if _is_pinned(checker, whole):
            checker.reach(whole, kind)


# Tensors and arrays over memory of arrays.


def _tensor_over(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `torch.frombuffer`, which asks for memory to write, and has not written it."""
    return original(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def _array_of(checker: RaceChecker, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `numpy.array` and its like: a view of watched memory is watched, a copy has read it."""
    if not args:
        return original(**kwargs)
    value, *others = args
    if _is_pinned(checker, value) and not value.requires_grad:
        value = value.numpy()
    if isinstance(value, WatchedArray):
        return views_or_read(value, original(plain(value), *others, **kwargs))
    if type(value) in (list, tuple) and value and isinstance(value[0], WatchedArray):
        read(arrays_in(value))
    return original(value, *others, **kwargs)


def _array_at(checker: RaceChecker, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `numpy.ctypeslib.as_array`. safetensors passes the address of its array on to other code."""
    made = original(*args, **kwargs)
    try:
        tensor = torch.from_numpy(made)
    except TypeError:  # torch has no such type of elements
        return made
    if not _is_pinned(checker, tensor):
        return made
    array = watched(made, partial(checker.reach_part, tensor))
    read([array])
    return array
