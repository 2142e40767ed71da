"""Arrays of numpy over pinned memory: their reads and writes are seen, as are those of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .race_buffers import region_of_array
from .race_exports import HAS_METHOD, note_exports
from .race_report import READ, WRITE
from .race_shadow import Extent, Layout

Array = np.ndarray[Any, Any]
Note = Callable[[Extent, int], None]
"""Takes an access: its place and its kind."""

_PARTS_FOLLOWED = 64
"""The stretches that an index of numpy's may choose; what chooses more is not followed."""
_WRITING = ("fill", "sort", "partition", "put", "resize", "setfield", "itemset", "__setstate__")
_ASKING = {"__array_wrap__", "__array_namespace__", "__dlpack__", "__dlpack_device__", "setflags", "to_device", "view"}
"""Methods that only ask about an array, or give its address away."""
_READING = (
    "__array__", "__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__",
    "__index__", "__int__", "__reduce__", "__reduce_ex__", "__repr__", "__str__",
    *(name for name, value in vars(np.ndarray).items()
      if callable(value) and name[:2] != "__" and name not in _ASKING and name not in _WRITING),
)  # fmt: skip
"""All other methods, save operators, which are universal functions. Where one returns a view, that is watched."""
_WRITERS = (np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis)
"""Functions that write their first argument; that of others is `out`."""
_ASKERS = (
    np.shape, np.ndim, np.size, np.may_share_memory, np.shares_memory, np.result_type, np.can_cast, np.min_scalar_type,
    np.empty_like, np.zeros_like, np.ones_like, np.full_like, np.iscomplexobj, np.isrealobj,
)  # fmt: skip

_HOLDERS = (np.ndarray, tuple, list, dict)


class WatchedArray(np.ndarray[Any, Any]):
    """An array that notes accesses of its memory; results that are not views are plain arrays."""

    _note: Note | None = None

    def __array_finalize__(self, base: Any) -> None:
        self._note = getattr(base, "_note", None)
        if not HAS_METHOD:
            self.__class__ = WatchedArray if self.flags.c_contiguous else _StridedArray

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, WatchedArray) and _is_view(found, self):
            return found
        _touch(self, READ, key)
        return plain(found)

    def __iter__(self) -> Iterator[Any]:
        if self.ndim < 2:
            _touch(self, READ)
            return iter(plain(self))
        return (self[row] for row in range(len(self)))

    def __setitem__(self, key: Any, value: Any) -> None:
        _touch(value, READ)
        _touch(self, WRITE, key)
        super().__setitem__(key, plain(value))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        for at, value in enumerate((*inputs, kwargs.get("where"))):
            _touch(value, WRITE if method == "at" and at == 0 else READ)
        for value in out:
            _touch(value, WRITE)
        if out:
            kwargs["out"] = tuple(map(plain, out))
        result = getattr(ufunc, method)(*map(plain, inputs), **{name: plain(one) for name, one in kwargs.items()})
        if not out:
            return result
        return out[0] if len(out) == 1 else out

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out, writes = kwargs.get("out"), func in _WRITERS
        result = func(*_unwrapped(args), **_unwrapped(kwargs))
        for array in arrays_in((args, kwargs)) if func not in _ASKERS else ():
            if array is out or (writes and array is args[0]):
                _touch(array, WRITE)
            else:
                result = views_or_read(array, result)
        return result if out is None else out

    def byteswap(self, inplace: bool = False) -> Any:
        _touch(self, WRITE if inplace else READ)
        swapped = plain(self).byteswap(inplace)
        return self if inplace else swapped


class _StridedArray(WatchedArray):
    """A watched array that is not contiguous, on Python 3.11: whether its buffer is given or refused is up to numpy."""


def _method(name: str, writes: bool) -> Callable[..., Any]:
    def called(self: WatchedArray, *args: Any, **kwargs: Any) -> Any:
        for array in arrays_in((args, kwargs)):
            _touch(array, WRITE if array is kwargs.get("out") else READ)
        result = getattr(plain(self), name)(*_unwrapped(args), **_unwrapped(kwargs))
        if not writes:
            return views_or_read(self, result)
        _touch(self, WRITE)
        return result

    return called


def _part(name: str) -> property:
    """Return an attribute that gives memory out, and that may perhaps be assigned to."""

    def given(self: WatchedArray) -> Any:
        return views_or_read(self, getattr(plain(self), name))

    def assigned(self: WatchedArray, value: Any) -> None:
        _touch(value, READ)
        _touch(self, WRITE)
        setattr(plain(self), name, plain(value))

    return property(given, assigned)


def views_or_read(array: WatchedArray, result: Any) -> Any:
    """Return the result of a call, its views of the array watched as that is; without any the call has read it."""
    if type(result) in (tuple, list):
        seen = [_view_of(array, one) for one in result]
        if any(one is not None for one in seen):
            return type(result)(old if new is None else new for old, new in zip(result, seen, strict=True))
    view = _view_of(array, result)
    if view is None:
        _touch(array, READ)
    return result if view is None else view


def _view_of(array: WatchedArray, result: Any) -> WatchedArray | None:
    is_view = isinstance(result, np.ndarray) and result.size and _is_view(result, array.view(np.ndarray))
    return watched(result, array._note) if is_view else None


for _name in {"flat", "real", "imag", "T", "mT"} & set(dir(np.ndarray)):  # numpy 1 has no mT
    setattr(WatchedArray, _name, _part(_name))
for _name in set(_READING) - vars(WatchedArray).keys():
    setattr(WatchedArray, _name, _method(_name, writes=False))
for _name in set(_WRITING) & set(dir(np.ndarray)):  # numpy 2 has no itemset
    setattr(WatchedArray, _name, _method(_name, writes=True))
note_exports(WatchedArray, lambda array, writes: _touch(array, WRITE if writes else READ))
# Programs and numpy itself ask for the type's name.
for _kind in (WatchedArray, _StridedArray):
    _kind.__name__ = _kind.__qualname__ = "ndarray"
    _kind.__module__ = "numpy"


def watched(memory: Array, note: Note | None) -> WatchedArray:
    """Return the array as one whose accesses are noted."""
    array = memory.view(WatchedArray)
    array._note = note
    return array


def plain(value: Any) -> Any:
    """Return an array of the same memory whose accesses are not noted; return any other value as it is."""
    return value.view(np.ndarray) if isinstance(value, WatchedArray) else value


def _unwrapped(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(map(_unwrapped, value)) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {name: _unwrapped(one) for name, one in value.items()}
    return plain(value)


def arrays_in(value: Any) -> Iterator[WatchedArray]:
    """Return the watched arrays in nested tuples, dicts and lists. A list that begins with a number is not searched."""
    if isinstance(value, WatchedArray):
        yield value
    elif isinstance(value, dict):
        yield from arrays_in(tuple(value.values()))
    elif isinstance(value, tuple) or (isinstance(value, list) and value and isinstance(value[0], _HOLDERS)):
        for one in value:
            yield from arrays_in(one)


def read(arrays: Iterable[WatchedArray]) -> None:
    """Note that these are read."""
    for array in arrays:
        _touch(array, READ)


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
    return part.size == 0 or bool(np.may_share_memory(plain(part), plain(whole)))


def _region(part: Array) -> Extent:
    low, high = region_of_array(part)[:2]
    if part.flags.c_contiguous or any(stride < 0 for stride in part.strides):
        return low, high, None, None
    dims = [(size, stride) for size, stride in zip(part.shape, part.strides, strict=True) if size > 1]
    return low, high, Layout(tuple(d[0] for d in dims), tuple(d[1] for d in dims), part.itemsize), None
