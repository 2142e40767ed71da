"""The short way of calls that never wait: they are checked as they are written, and run past the dispatch modes.

A dispatch mode costs more than a small operator does, and a call such as `linear` comes to it three times. In a decode
loop nearly all calls are arithmetic and views on plain tensors, of which all is known before they run. Whatever is not
plainly so goes the long way: other modes, subclasses, gradients, autocast, a host tensor beside a device tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from . import marks
from .race_ops import OperatorPlan
from .race_report import READ
from .sync_ops import SyncOps, mark

LONG_WAY = object()
"""Returned for a call that has to go the long way."""
_PLAN = OperatorPlan(None, "", (), False, True, 0, False, None, "")
"""The plan of all calls that make new tensors, for the checker of races, which is given their reads."""

_PLAIN = (Tensor, Parameter)
_SCALARS = (int, float, bool, NoneType, str, torch.dtype, torch.memory_format, torch.Size)
_INDEXES = (int, NoneType, EllipsisType)

_grads: Callable[[], bool] = torch.is_grad_enabled
_casts: Callable[[], bool] = torch._C._is_any_autocast_enabled
_functions: Callable[[], int] = torch._C._len_torch_function_stack
_dispatches: Callable[[], int] = torch._C._len_torch_dispatch_stack
Unseen: Any = torch._C._DisableTorchDispatch
"""A region that runs past the dispatch modes."""


def is_open() -> bool:
    """Return whether the calling thread's state allows the short way: one dispatch mode, no autocast."""
    return _dispatches() == 1 and not (_casts() or _functions())


def _is_plain(tensor: Any) -> bool:
    """Return whether a view of this needs neither a subclass nor a gradient."""
    return type(tensor) in _PLAIN and not (_grads() and tensor.requires_grad)


class Short(NamedTuple):
    """A call that may go the short way."""

    run: Callable[[Short, SyncOps, Any, tuple[Any, ...], dict[str, Any] | None], Any]
    """Runs it, or returns LONG_WAY."""
    tensors: tuple[int, ...] = ()
    """Positions for tensors; a tensor in a number's position makes it wait."""
    most: int = 8
    """The largest number of positional arguments that is known to write nothing."""


def _view(short: Short, ops: SyncOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run a call that only computes an address."""
    if kwargs or not _is_plain(args[0]) or not _are_numbers(args[1:]):
        return LONG_WAY
    with Unseen():
        return func(*args)


def _item(short: Short, ops: SyncOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an indexing by numbers and slices of numbers."""
    index = args[1]
    for one in index if type(index) is tuple else (index,):
        kind = type(one)
        if kind is slice:
            if not (type(one.start) in _INDEXES and type(one.stop) in _INDEXES and type(one.step) in _INDEXES):
                return LONG_WAY
        elif kind not in _INDEXES:
            return LONG_WAY
    if not _is_plain(args[0]):
        return LONG_WAY
    with Unseen():
        return func(*args)


def _dense_view(short: Short, ops: SyncOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run `reshape` or `contiguous` of a tensor without gaps: they are views."""
    is_view = not kwargs and _is_plain(args[0]) and args[0].is_contiguous()
    return _view(short, ops, func, args, kwargs) if is_view else LONG_WAY


def _to(short: Short, ops: SyncOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run a conversion to another type by `x.to(dtype)`; to the same type it is nothing."""
    if kwargs or len(args) != 2 or type(args[1]) is not torch.dtype or type(args[0]) not in _PLAIN:
        return LONG_WAY
    return args[0] if args[0].dtype is args[1] else _new(short, ops, func, args, kwargs)


def _are_numbers(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind not in _SCALARS and not ((kind is tuple or kind is list) and all(type(one) is int for one in value)):
            return False
    return True


def _new(short: Short, ops: SyncOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run a call that reads its tensors and makes new ones."""
    if _grads() or len(args) > short.most or (kwargs and not _are_numbers(kwargs.values())):
        return LONG_WAY
    if kwargs and kwargs.get("inplace"):
        return LONG_WAY
    device = host = False
    known, tensors = marks.DEVICE_TENSORS.refs, short.tensors
    uses: list[tuple[Tensor, int]] = []
    try:
        for at, value in enumerate(args):
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                if at not in tensors:
                    return LONG_WAY
                # `value in marks.DEVICE_TENSORS`, inlined here and below: a call takes 0.2 us more a tensor.
                storage = value.untyped_storage()
                uses.append((value, READ))
                ref = known.get(id(storage))
                if ref is not None and ref() is storage:
                    device = True
                elif value.dim():
                    host = True
            elif kind not in _SCALARS:
                if (kind is not tuple and kind is not list) or not value:
                    return LONG_WAY
                for one in value:
                    kind = type(one)
                    if kind is Tensor or kind is Parameter:
                        if at not in tensors:
                            return LONG_WAY
                        storage = one.untyped_storage()
                        uses.append((one, READ))
                        ref = known.get(id(storage))
                        if ref is not None and ref() is storage:
                            device = True
                        elif one.dim():
                            host = True
                    elif kind is not int:
                        return LONG_WAY
    except (NotImplementedError, RuntimeError):
        return LONG_WAY  # no storage: sparse, or within a transform of functions
    if device and host:
        return LONG_WAY
    try:
        with Unseen():
            checker = ops.checker
            if checker is None or not checker.active:
                out = func(*args, **kwargs) if kwargs else func(*args)
                if device:
                    mark(out)
                return out
            named = kwargs or {}
            site, actor = checker.saw(_PLAN, args, named, 4, uses)
            out = func(*args, **named)
            if device:
                mark(out)
            if checker.follows_results:
                checker.ran(_PLAN, args, named, out, site, actor, device)
            return out
    except NotImplementedError:
        return LONG_WAY  # the CPU has no kernel for the type


def _where(short: Short, ops: SyncOps, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    # With one argument it counts the hits, and the host waits.
    return LONG_WAY if len(args) != 3 else _new(short, ops, func, args, kwargs)


def _both(names: str) -> list[Any]:
    """Return the methods of Tensor and the functions of torch that have these names."""
    found = [getattr(owner, name, None) for name in names.split() for owner in (Tensor, torch)]
    return [one for one in found if one is not None]


_VIEWS = _both(
    "view transpose unsqueeze squeeze permute expand expand_as narrow select unbind t swapaxes swapdims movedim "
    "diagonal unflatten"
)
_ONE = _both(
    "rsqrt sqrt neg abs exp log log2 log1p sin cos tanh sigmoid erf reciprocal square floor ceil round sign mean var "
    "std cumsum argmax argmin softmax log_softmax logical_not isnan isinf clone any all relu topk sort argsort __neg__ "
    "__invert__ triu tril"
)
_TWO = _both(
    "mul add sub div pow matmul mm bmm mv maximum minimum eq ne lt le gt ge logical_and logical_or bitwise_and "
    "bitwise_or bitwise_xor floor_divide remainder fmod true_divide atan2 __and__ __or__ __xor__ __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ __rsub__ __rmul__ __rtruediv__ __rpow__ __matmul__"
)

SHORT_CALLS: dict[Any, Short] = {
    **{func: Short(_view) for func in _VIEWS},
    **{func: Short(_new, (0,)) for func in _ONE},
    **{func: Short(_new, (0, 1)) for func in _TWO},
    **{func: Short(_dense_view) for func in (Tensor.reshape, torch.reshape, Tensor.contiguous)},
    **{func: Short(_new, (0,), most=1) for func in (F.silu, F.gelu, F.relu, F.sigmoid, F.tanh)},
    **{func: Short(_new, (0,)) for func in (F.softmax, F.log_softmax)},
    **{func: Short(_new, (0,)) for func in (torch.cat, torch.stack)},
    Tensor.__getitem__: Short(_item),
    Tensor.to: Short(_to, (0,)),
    F.linear: Short(_new, (0, 1, 2)),
    F.scaled_dot_product_attention: Short(_new, (0, 1, 2, 3)),
    F.rms_norm: Short(_new, (0, 2)),
    F.layer_norm: Short(_new, (0, 2, 3)),
    torch.where: Short(_where, (0, 1, 2)),
    torch.addmm: Short(_new, (0, 1, 2)),
}
"""The calls that may go the short way, by what a function mode is given."""

GETTERS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "layout", "ndim", "grad_fn", "requires_grad")),
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "element_size", "is_floating_point")),
    ]
)
"""Calls that ask a tensor for facts that the host has."""
