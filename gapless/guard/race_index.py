"""Which elements or rows an operator touches whose index chooses them.

An index is read by its address, and only on the CPU. Where its values are row numbers as they stand there, which is
the rule, they are used as they are; else the elements are computed, for a buffer watched by bytes only when somebody
else has touched it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64s = npt.NDArray[np.int64]
Ints = npt.NDArray[Any]


class Way(Enum):
    """How the index of an operator is given."""

    LIST = 1
    """args[1] is a list: an index for each of the first dimensions."""
    FIRST = 2
    """args[1] names rows of the first dimension."""
    DIM = 3
    """args[2] names slices of dimension args[1]."""
    ALONG = 4
    """args[2] has an index for each element, along dimension args[1]."""


# The twins that return a new tensor (index_copy, scatter, ...) are not here: they read all of their first argument.
_WAYS = {
    **dict.fromkeys(("index", "_unsafe_index", "index_put_", "_index_put_impl_"), Way.LIST),
    **dict.fromkeys(("index_select", "index_copy_", "index_add_", "index_fill_", "index_reduce_"), Way.DIM),
    **dict.fromkeys(("gather", "scatter_", "scatter_add_", "scatter_reduce_"), Way.ALONG),
    "embedding": Way.FIRST,
}


def way(name: str) -> Way | None:
    """How the operator's index is given; None where it has none."""
    return _WAYS.get(name)


class Elements(NamedTuple):
    """Chosen elements of a tensor: `offsets` times `step` elements from its first, and `reach` further each."""

    offsets: Int64s
    step: int
    reach: int


class Choice(NamedTuple):
    """What an operator chooses: the form of the tensor, and the indexes as arrays, None for a dimension left whole."""

    way: Way
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dim: int
    indexes: list[Any]

    def elements(self) -> Elements:
        """The elements that are chosen."""
        if self.way is Way.DIM:
            return _by_dim(self.sizes, self.strides, self.dim, self.indexes[0])
        if self.way is Way.ALONG:
            return _along_dim(self.strides, self.dim, self.indexes[0])
        return _by_list(self.sizes, self.strides, self.indexes)


def choice(way: Way, args: Sequence[Any], copied: bool) -> Choice | None:
    """What a call chooses of args[0], whose indexes are `copied` if they are to be looked at later.

    None when they cannot be read without waiting.
    """
    source = args[0]
    sizes, strides = source.shape, source.stride()
    if way is Way.LIST or way is Way.FIRST:
        dim, given = 0, args[1] if way is Way.LIST else [args[1]]
    elif not sizes:
        return None
    else:
        dim, given = args[1] % len(sizes), [args[2]]
    indexes: list[Any] = []
    for index in given:
        known = None if index is None else values(index)
        if known is None and index is not None:
            return None
        indexes.append(known.copy() if copied and known is not None else known)
    return Choice(way, sizes, strides, dim, indexes)


def _by_list(sizes: Sequence[int], strides: Sequence[int], indexes: Sequence[Any]) -> Elements:
    offsets: Any = None
    dim = reach = 0
    for known in indexes:
        if known is None:
            reach += (sizes[dim] - 1) * strides[dim]
            dim += 1
            continue
        # A mask chooses in as many dimensions as it has itself.
        for part in np.nonzero(known) if known.dtype == np.bool_ else (known,):
            ahead = _wrapped(part, sizes[dim]) * strides[dim]
            offsets = ahead if offsets is None else offsets + ahead
            dim += 1
    for size, stride in zip(sizes[dim:], strides[dim:], strict=True):
        reach += (size - 1) * stride
    return Elements(np.zeros(1, np.int64) if offsets is None else offsets.ravel(), 1, reach)


def _by_dim(sizes: Sequence[int], strides: Sequence[int], dim: int, index: Any) -> Elements:
    reach = -(sizes[dim] - 1) * strides[dim]
    for size, stride in zip(sizes, strides, strict=True):
        reach += (size - 1) * stride
    return Elements(index.ravel(), strides[dim], reach)


def _along_dim(strides: Sequence[int], dim: int, index: Any) -> Elements:
    offsets = index * strides[dim]
    for d, size in enumerate(index.shape):
        if d != dim:
            shape = [1] * index.ndim
            shape[d] = size
            offsets = offsets + (np.arange(size) * strides[d]).reshape(shape)
    return Elements(offsets.ravel(), 1, 0)


def _wrapped(index: Any, size: int) -> Any:
    return np.where(index < 0, index + size, index) if index.size and index.min() < 0 else index


# Parts of a buffer.


class Chosen:
    """Bytes that an index chose: `span` of them from each of `starts`. Equal to itself alone."""

    __slots__ = ("_base", "_choice", "_itemsize")

    def __init__(self, choice: Choice, base: int, itemsize: int) -> None:
        """Of a tensor that begins at byte `base` of the buffer. Nothing is computed before it is needed."""
        self._choice, self._base, self._itemsize = choice, base, itemsize

    def parts(self) -> tuple[Ints, int]:
        """`starts` and `span`."""
        offsets, step, reach = self._choice.elements()
        return self._base + offsets * (step * self._itemsize), (reach + 1) * self._itemsize


class Window(NamedTuple):
    """Rows by their numbers in a part of a buffer, `first` to `stop`; negative ones count from its end."""

    first: int
    stop: int
    numbers: Ints


def window(way: Way, args: Sequence[Any], base: int, stride: int) -> Window | None:
    """The rows of `stride` bytes that a call names, if the rows of args[0], which is contiguous, are those rows."""
    source = args[0]
    if way is Way.LIST:
        index = args[1][0]
    elif way is Way.DIM:
        index = None if args[1] else args[2]
    else:
        index = args[1] if way is Way.FIRST else None
    if index is None or index.dtype not in _ROW_NUMBERS or base % stride or not (sizes := source.shape):
        return None
    if source.nbytes != sizes[0] * stride or (known := values(index)) is None:
        return None
    first = base // stride
    return Window(first, first + sizes[0], known)


def rows(choice: Choice, base: int, itemsize: int, stride: int) -> Ints:
    """Rows of `stride` bytes that hold the chosen elements of a tensor that begins at byte `base`."""
    offsets, step, reach = choice.elements()
    start = offsets * (step * itemsize) + base
    low = start // stride
    # One element lies in one row; only what reaches further may leave it.
    if reach and ((high := (start + (reach + 1) * itemsize - 1) // stride) > low).any():
        low = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(low, high, strict=True)]))
    return low


# Reading an index.

_KINDS: dict[torch.dtype, Any] = {
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.uint8: np.dtype(np.bool_),
    torch.bool: np.dtype(np.bool_),
}
_ROW_NUMBERS = (torch.int64, torch.int32)

# Numpy wants a bound, and a type of its own for every size would cost 50 us each. Nothing is read beyond the strides.
_MEMORY = ctypes.c_char * (1 << 46)


def values(tensor: Tensor) -> Any:
    """An index's values as an array that shares its memory, or None when they are not on the CPU.

    By address: `Tensor.numpy` runs operators, which other modes would see.
    """
    kind = _KINDS.get(tensor.dtype)
    if kind is None or not tensor.is_cpu:
        return None
    count = tensor.numel()
    if not count:
        return np.zeros(tuple(tensor.shape), kind)
    memory: Any = _MEMORY.from_address(tensor.data_ptr())
    if tensor.is_contiguous():
        flat = np.frombuffer(memory, kind, count)
        return flat if tensor.dim() == 1 else flat.reshape(tuple(tensor.shape))
    strides = tuple(stride * kind.itemsize for stride in tensor.stride())
    return np.ndarray(tuple(tensor.shape), kind, memory, 0, strides)
