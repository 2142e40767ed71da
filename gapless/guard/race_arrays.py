"""Arrays of numpy over pinned memory: their reads and writes are seen, as are those of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .race_buffers import region_of_array
from .race_report import READ, WRITE
from .race_shadow import Extent, Layout

Array = np.ndarray[Any, Any]
Note = Callable[[Extent, int], None]
"""Takes an access: its place and its kind."""

_PARTS_FOLLOWED = 64
"""The stretches that an index of numpy's may choose; what chooses more is not followed."""
_READING = (
    "tolist", "item", "tobytes", "astype", "copy", "argmax", "argmin", "argsort", "nonzero", "take", "dot", "cumsum",
    "searchsorted", "__int__", "__float__", "__bool__", "__iter__", "__contains__", "__repr__", "__str__",
    "__reduce_ex__", "__deepcopy__",
)  # fmt: skip
_WRITING = ("fill", "sort", "partition", "put")
_WRITERS = (np.copyto, np.put, np.place, np.putmask, np.fill_diagonal)
"""Functions that write their first argument; that of others is `out`."""


class WatchedArray(np.ndarray[Any, Any]):
    """An array that notes accesses of its memory; results that are not views are plain arrays."""

    _note: Note | None = None

    def __array_finalize__(self, base: Any) -> None:
        self._note = getattr(base, "_note", None)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, WatchedArray) and _is_view(found, self):
            return found
        _touch(self, READ, key)
        return _plain(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        _touch(value, READ)
        _touch(self, WRITE, key)
        super().__setitem__(key, _plain(value))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        for at, value in enumerate((*inputs, kwargs.get("where"))):
            _touch(value, WRITE if method == "at" and at == 0 else READ)
        for value in out:
            _touch(value, WRITE)
        if out:
            kwargs["out"] = tuple(map(_plain, out))
        result = getattr(ufunc, method)(*map(_plain, inputs), **{name: _plain(one) for name, one in kwargs.items()})
        if not out:
            return result
        return out[0] if len(out) == 1 else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out, writes = kwargs.get("out"), func in _WRITERS
        for array in _arrays((args, kwargs)):
            _touch(array, WRITE if array is out or (writes and array is args[0]) else READ)
        result = func(*_unwrapped(args), **_unwrapped(kwargs))
        return result if out is None else out


def _method(name: str, kind: int) -> Callable[..., Any]:
    def called(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        _touch(self, kind)
        return getattr(_plain(self), name)(*_unwrapped(args), **_unwrapped(kwargs))

    return called


for _name in _READING:
    setattr(WatchedArray, _name, _method(_name, READ))
for _name in _WRITING:
    setattr(WatchedArray, _name, _method(_name, WRITE))
# Programs and numpy itself ask for the type's name.
WatchedArray.__name__, WatchedArray.__module__ = "ndarray", "numpy"


def watched(memory: Array, note: Note) -> WatchedArray:
    """Return the array as one whose accesses are noted."""
    array = memory.view(WatchedArray)
    array._note = note
    return array


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, WatchedArray) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_unwrapped, value)) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {name: _unwrapped(one) for name, one in value.items()}
    return _plain(value)


def _arrays(value: Any) -> Iterator[WatchedArray]:
    if isinstance(value, WatchedArray):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _arrays(one)


def _touch(array: Any, kind: int, key: Any = Ellipsis) -> None:
    """Note an access to what `key` chooses of an array, if that is a watched one."""
    note = array._note if isinstance(array, WatchedArray) else None
    if note is None:
        return
    whole: Array = array.view(np.ndarray)
    for part in _parts(whole, key):
        if part.size:
            note(_region(part), kind)


def _parts(whole: Array, key: Any) -> list[Array]:
    """Return what the key chooses, as views."""
    keys = key if isinstance(key, tuple) else (key,)
    part = whole[key] if any(one is Ellipsis for one in keys) else whole[(*keys, ...)]
    if _is_view(part, whole):
        return [part]
    if not whole.flags.c_contiguous:
        return []
    # A list, an array or a mask: the elements that it chooses, by their numbers.
    numbers = np.unique(np.arange(whole.size).reshape(whole.shape)[key])
    stretches = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    followed = stretches if len(stretches) <= _PARTS_FOLLOWED else []
    return [whole.reshape(-1)[one[0] : one[-1] + 1] for one in followed]


def _is_view(part: Array, whole: Array) -> bool:
    return part.size == 0 or bool(np.may_share_memory(part, whole))


def _region(part: Array) -> Extent:
    low, high = region_of_array(part)[:2]
    if part.flags.c_contiguous or any(stride < 0 for stride in part.strides):
        return low, high, None, None
    dims = [(size, stride) for size, stride in zip(part.shape, part.strides, strict=True) if size > 1]
    return low, high, Layout(tuple(d[0] for d in dims), tuple(d[1] for d in dims), part.itemsize), None
