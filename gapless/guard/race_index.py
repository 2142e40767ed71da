"""Finds the elements or rows that an operator touches through an index.

An index is read by its address, and only on the CPU. If its values are row numbers already, which is the rule, they
are used unchanged; otherwise the elements are computed, for a buffer watched by bytes only when another agent has
touched it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[Any]


LIST, FIRST_ARGUMENT, DIMENSION, ALONG = range(1, 5)
"""How the index of an operator is given. LIST: args[1] has an index for each of the first dimensions. FIRST: args[1]
names rows of the first dimension. DIM: args[2] names slices of dimension args[1]. ALONG: args[2] has an index for each
element, along dimension args[1]."""

# The forms that return a new tensor (index_copy, scatter, ...) are not here: they read all of their first argument.
WAYS = {
    **dict.fromkeys(("index", "_unsafe_index", "index_put_", "_index_put_impl_"), LIST),
    **dict.fromkeys(("index_select", "index_copy_", "index_add_", "index_fill_", "index_reduce_"), DIMENSION),
    **dict.fromkeys(("gather", "scatter_", "scatter_add_", "scatter_reduce_"), ALONG),
    "embedding": FIRST_ARGUMENT,
}


class IndexUnknown(Exception):
    """An index that cannot be read without waiting."""


Stated = Callable[[Sequence[Any]], Sequence[tuple[Tensor, Ints | tuple[Ints, ...]]]]
"""A function from the arguments of an operator to the tensors among them, each with the rows that it touches, or with
an index for each of its first dimensions."""

STATED: dict[str, Stated] = {}
"""Stated accesses of operators that are not torch's own, by full name ("library::name"). Used on the CPU alone."""


def stated(name: str, args: Sequence[Any]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return the tensors that such an operator touches, as stated, each with an index for its first dimensions."""
    state = STATED.get(name)
    if state is None or not all(value.is_cpu for value in args if isinstance(value, Tensor)):
        return []
    # The function that states them may compute with tensors.
    with torch._C._DisableTorchDispatch():
        found = [(tensor, rows if isinstance(rows, tuple) else (rows,)) for tensor, rows in state(args)]
        return [(tensor, [torch.from_numpy(rows.astype(np.int64)) for rows in indexes]) for tensor, indexes in found]


Kept = bytes | tuple[bytes, Any, tuple[int, ...]]
"""The values of an index as they were, their type and shape. The values alone for int64 in one dimension, the rule."""


Chosen = tuple[int, int, tuple[int, ...], tuple[int, ...], int, int, tuple[Kept | None, ...]]
"""An index's choice from args[0]: the way; address, sizes, strides and bytes of an element of args[0]; the dimension;
the indexes as they were. A plain tuple, since every such operator makes one, and it is read only when another agent has
touched the same memory."""


def choose(way: int, args: Sequence[Any], at: int) -> Chosen:
    """Note what the index chooses of args[0], which is at address `at`. Raises IndexUnknown."""
    source, dim = args[0], 0
    if way == LIST:
        indexes = tuple(map(_keep, args[1]))
    elif way == FIRST_ARGUMENT:
        indexes = (_keep(args[1]),)
    else:
        dim, indexes = args[1], (_keep(args[2]),)
    return way, at, source.shape, source.stride(), source.itemsize, dim, indexes


def parts_of(chosen: Chosen) -> tuple[Ints, int]:
    """Return the address of each part, and its size in bytes."""
    way, at, sizes, strides, itemsize, dim, kept = chosen
    indexes = [None if index is None else _kept(index) for index in kept]
    if way in (LIST, FIRST_ARGUMENT):
        offsets, reach = _by_list(sizes, strides, indexes)
    elif not sizes:
        offsets, reach = np.zeros(1, np.int64), 0
    elif way == DIMENSION:
        offsets, reach = _by_list(sizes, strides, [None] * (dim % len(sizes)) + indexes)
    else:
        offsets, reach = _along_dim(strides, dim % len(sizes), indexes[0]), 0
    return at + offsets.astype(np.int64) * itemsize, (reach + 1) * itemsize


def rows_of(chosen: Chosen, start: int, stride: int) -> Ints:
    """Return the rows of `stride` bytes from address `start` that hold the parts."""
    at, span = parts_of(chosen)
    first, last = (at - start) // stride, (at - start + span - 1) // stride
    # One element is in one row; only what reaches further may leave it.
    if (last > first).any():
        first = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]))
    return first


def _by_list(sizes: Sequence[int], strides: Sequence[int], indexes: Sequence[Any]) -> tuple[Any, int]:
    """Return the first element of each part that an index in each of the first dimensions chooses, and its reach."""
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
    return np.zeros(1, np.int64) if offsets is None else offsets.ravel(), reach


def _along_dim(strides: Sequence[int], dim: int, index: Any) -> Any:
    index = np.atleast_1d(index)
    places = list(np.indices(index.shape, sparse=True))
    places[dim] = index
    return sum(place * stride for place, stride in zip(places, strides, strict=True)).ravel()


def _wrapped(index: Any, size: int) -> Any:
    return np.where(index < 0, index + size, index) if index.size and index.min() < 0 else index


def named_rows(way: int, args: Sequence[Any], rows: Ints, stride: int) -> Ints | None:
    """Return the `rows` that a call names, if each slice of args[0] is in one of them, else None.

    `rows` are rows of args[0], `stride` bytes apart. Raises IndexError for a row out of range.
    """
    source = args[0]
    if way == LIST:
        index = args[1][0]
    elif way == DIMENSION:
        index = None if args[1] else args[2]
    else:
        index = args[1] if way == FIRST_ARGUMENT else None
    if index is None or not source.dim() or len(source) != len(rows) or source.stride(0) * source.itemsize != stride:
        return None
    kind = _KINDS.get(index.dtype)
    if kind is None or kind is _MASK or not index.is_cpu or not index.is_contiguous():
        return None
    count = index.numel()
    # This makes a copy: the index may change before the rows are looked at.
    return rows[np.frombuffer(_memory_at(index.data_ptr()), kind, count) if count else np.zeros(0, kind)]


# Reading an index.

_INT64 = np.dtype(np.int64)
_MASK = np.dtype(np.bool_)
_KINDS: dict[torch.dtype, Any] = {
    torch.int64: _INT64,
    torch.int32: np.dtype(np.int32),
    torch.uint8: _MASK,
    torch.bool: _MASK,
}

# Numpy wants a bound, and a type of its own for every size would cost 50 us each. Nothing is read beyond the strides.
_memory_at: Any = (ctypes.c_char * (1 << 46)).from_address


def _keep(index: Tensor | None) -> Kept | None:
    """Copy an index, by its address: `Tensor.numpy` runs operators, which other modes would see."""
    if index is None:
        return None
    if index.dtype is torch.int64 and index.is_cpu and index.dim() == 1 and index.is_contiguous():
        memory: bytes = _memory_at(index.data_ptr())[: index.nbytes]
        return memory
    kind = _KINDS.get(index.dtype)
    if kind is None or not index.is_cpu:
        raise IndexUnknown
    if not index.numel():
        return b"", kind, index.shape
    strides = tuple(stride * kind.itemsize for stride in index.stride())
    values: Any = np.ndarray(tuple(index.shape), kind, _memory_at(index.data_ptr()), 0, strides)
    return values.tobytes(), kind, index.shape


def _kept(kept: Kept) -> Any:
    if isinstance(kept, bytes):
        return np.frombuffer(kept, _INT64)
    memory, kind, shape = kept
    values: Any = np.frombuffer(memory, kind).reshape(tuple(shape))
    return values if kind is _MASK else values.astype(np.int64)  # addresses follow from them
