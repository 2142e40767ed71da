"""Reads from an operator's schema which tensors it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .race_index import WAYS
from .race_report import READ, WRITE
from .sync_ops import OpCheck, check_of

# Only the shape and type of their tensor argument count, or only its bookkeeping changes.
_NO_MEMORY = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_empty_strided", "set_", "resize_", "resize_as_", "record_stream",
    "_resize_output_", "is_pinned", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "is_contiguous",
    "sym_is_contiguous",
}  # fmt: skip

_COPIES = {"copy_", "_foreach_copy_", "_to_copy", "_copy_from", "_copy_from_and_resize"}
_COPIES_INTO = {"copy_", "_foreach_copy_"}


_MOST_ARGUMENTS = 8
"""The positions of a higher-order operator that are looked at for tensors."""


class Arg(NamedTuple):
    """A tensor argument, or a list of them when `many`."""

    position: int
    name: str
    kind: int
    many: bool


class OperatorPlan(NamedTuple):
    """Facts about one operator that hold for every call."""

    op: Any
    """The operator, held so that its id stays its own."""
    name: str
    args: tuple[Arg, ...]
    is_idle: bool
    """Whether it touches no memory: a view, most of all."""
    makes: bool
    """Whether it returns tensors of its own."""
    way: int
    """How an index chooses what the operator touches of its first argument; 0 if none does."""
    copies: bool
    """Whether it copies between tensors, which may lie on host and device."""
    waits: OpCheck | None
    """The check of whether the host waits for the device in it; None where it never does."""
    custom: str
    """The full name of an operator that is not torch's own: its accesses by row are known if they were stated."""
    around: Any = None
    """Runs an idle operator in another way: called with its runner, the operator, its arguments and keywords."""


def plan(op: Any) -> OperatorPlan:
    """Make the plan of an operator. A view only computes an address."""
    schema = getattr(op, "_schema", None)
    if schema is None:  # a higher-order operator, which reads its tensors
        args = tuple(Arg(position, "", READ, False) for position in range(_MOST_ARGUMENTS))
        return OperatorPlan(op, "", args, False, True, 0, False, None, "")
    if _is_view(schema):
        return OperatorPlan(op, "", (), True, False, 0, False, None, "")
    space, _, name = schema.name.partition("::")
    makes = any("Tensor" in str(result.type) and result.alias_info is None for result in schema.returns)
    args = () if name in _NO_MEMORY else _arguments(schema)
    chosen, copies, custom = WAYS.get(name, 0), name in _COPIES, "" if space == "aten" else schema.name
    return OperatorPlan(op, name, args, not args and not makes, makes, chosen, copies, check_of(schema), custom)


def non_blocking(plan: OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a copy was asked not to wait."""
    return bool(kwargs.get("non_blocking", args[2] if plan.name in _COPIES_INTO and len(args) > 2 else False))


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


def tensors(plan: OperatorPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
    """Return the tensors of one call and its accesses to them."""
    found = []
    count = len(args)
    for position, name, kind, many in plan.args:
        value = args[position] if position < count else kwargs.get(name)
        if many:
            for one in value or ():
                if isinstance(one, Tensor):
                    found.append((one, kind))  # noqa: PERF401 - a comprehension costs more here
        elif isinstance(value, Tensor):  # a number may stand in for one
            found.append((value, kind))
    return found
