"""Which tensors an operator reads and writes, from its schema; and which elements, where an index says so."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.guard.race_report import READ, WRITE

Int64s = npt.NDArray[np.int64]

# Only the shape and type of their tensor argument count, or only its bookkeeping changes.
_NO_MEMORY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "set_", "resize_", "resize_as_", "record_stream",
    "_resize_output_", "is_pinned", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "is_contiguous",
}  # fmt: skip


# The twins that return a new tensor (index_copy, scatter, ...) are not here: they read all of their first argument.
BY_LIST = ("index", "_unsafe_index", "index_put_", "_index_put_impl_")
_BY_DIM = ("index_select", "index_copy_", "index_add_", "index_fill_", "index_reduce_")
_ALONG_DIM = ("gather", "scatter_", "scatter_add_", "scatter_reduce_")
_CHOOSING = {*BY_LIST, *_BY_DIM, *_ALONG_DIM, "embedding"}


class Arg(NamedTuple):
    """A tensor argument, or a list of them when `many`."""

    position: int
    name: str
    kind: int
    many: bool


class Plan(NamedTuple):
    """What every call of one operator has in common."""

    name: str
    args: tuple[Arg, ...]
    makes: bool
    """Whether it returns tensors of its own."""
    chooses: bool
    """Whether an index chooses what it touches of its first argument."""


def plan(op: Any) -> Plan:
    """The plan of an operator. One without a schema is not followed; a view touches nothing: it computes an address."""
    schema = getattr(op, "_schema", None)
    if schema is None or _is_view(schema):
        return Plan("", (), False, False)
    name = schema.name.split("::")[-1]
    makes = any("Tensor" in str(result.type) and result.alias_info is None for result in schema.returns)
    return Plan(name, () if name in _NO_MEMORY else _arguments(schema), makes, name in _CHOOSING)


def _arguments(schema: Any) -> tuple[Arg, ...]:
    found = []
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        if "Tensor" in kind:
            written = argument.alias_info is not None and argument.alias_info.is_write
            found.append(Arg(position, argument.name, WRITE if written else READ, "List" in kind))
    return tuple(found)


def _is_view(schema: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)


def tensors(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """The tensors of one call and what it does to them."""
    count = len(args)
    for position, name, kind, many in plan.args:
        value = args[position] if position < count else kwargs.get(name)
        if many:
            for one in value or ():
                if isinstance(one, Tensor):
                    yield one, kind
        elif isinstance(value, Tensor):  # a number may stand in for one
            yield value, kind


class Elements(NamedTuple):
    """Chosen elements of a tensor: `offsets` times `step` elements from its first, and `reach` further each."""

    offsets: Int64s
    step: int
    reach: int


def elements(name: str, args: Sequence[Any]) -> Elements | None:
    """What the call of operator `name` chooses of args[0]; None when the index cannot be read without waiting."""
    source = args[0]
    if name in BY_LIST:
        return _by_list(source, args[1])
    if name == "embedding":
        return _by_list(source, [args[1]])
    dim = args[1] % source.dim() if source.dim() else 0
    index = values(args[2])
    if index is None or not source.dim():
        return None
    if name in _BY_DIM:
        return _by_dim(source, dim, index)
    return _along_dim(source, dim, index)


def _by_list(source: Tensor, indices: Sequence[Tensor | None]) -> Elements | None:
    offsets: Any = None
    sizes, strides = source.shape, source.stride()
    dim = reach = 0
    for index in indices:
        if index is None:
            reach += (sizes[dim] - 1) * strides[dim]
            dim += 1
            continue
        known = values(index)
        if known is None:
            return None
        # A mask chooses in as many dimensions as it has itself.
        for part in np.nonzero(known) if known.dtype == np.bool_ else (known,):
            ahead = _wrapped(part, sizes[dim]) * strides[dim]
            offsets = ahead if offsets is None else offsets + ahead
            dim += 1
    for size, stride in zip(sizes[dim:], strides[dim:], strict=True):
        reach += (size - 1) * stride
    return Elements(np.zeros(1, np.int64) if offsets is None else offsets.ravel(), 1, reach)


def first_rows(source: Tensor, indices: Sequence[Tensor | None]) -> Elements | None:
    """What a list of indices chooses, as whole rows of the first dimension: its own index says it all.

    None where no row numbers stand there.
    """
    index, strides = indices[0], source.stride()
    known = None if index is None else values(index)
    if known is None or known.dtype == np.bool_:
        return None
    sizes = source.shape
    reach = 0
    for size, stride in zip(sizes[1:], strides[1:], strict=True):
        reach += (size - 1) * stride
    return Elements(_wrapped(known, sizes[0]).ravel(), strides[0], reach)


def _by_dim(source: Tensor, dim: int, index: Any) -> Elements:
    strides = source.stride()
    reach = -(source.shape[dim] - 1) * strides[dim]
    for size, stride in zip(source.shape, strides, strict=True):
        reach += (size - 1) * stride
    return Elements(index.ravel(), strides[dim], reach)


def _along_dim(source: Tensor, dim: int, index: Any) -> Elements:
    strides = source.stride()
    offsets = index * strides[dim]
    for d, size in enumerate(index.shape):
        if d != dim:
            shape = [1] * index.ndim
            shape[d] = size
            offsets = offsets + (np.arange(size) * strides[d]).reshape(shape)
    return Elements(offsets.ravel(), 1, 0)


def _wrapped(index: Any, size: int) -> Any:
    return np.where(index < 0, index + size, index) if index.size and index.min() < 0 else index


_KINDS: dict[torch.dtype, Any] = {
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.uint8: np.dtype(np.bool_),
    torch.bool: np.dtype(np.bool_),
}

# Numpy wants a bound, and a type of its own for every size would cost 50 us each. Nothing is read beyond the strides.
_MEMORY = ctypes.c_char * (1 << 46)


def values(tensor: Tensor) -> Any:
    """An index's values as an array that shares its memory, or None when they are not on the CPU.

    By address: `Tensor.numpy` runs operators, which other modes would see.
    """
    kind = _KINDS.get(tensor.dtype)
    if kind is None or tensor.device.type != "cpu":
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
