"""Facts from the schemas of torch's operators: the order of arguments, and which tensors a call reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_MOVES = ("resize_", "resize_as_", "set_")
"""Operators that give a tensor another address. An operator with out= may too, which shows at the end."""
_BOOKKEEPING = (*_MOVES, "record_stream", "_resize_output_", "is_pinned", "is_contiguous")
"""Operators that look at the bookkeeping of their tensors alone, or change it."""


class OperatorSchema(NamedTuple):
    """Facts about an operator. Read once: the questions cost more than a small operator takes to run."""

    op: Any
    """The operator, held so that no other gets its id."""
    moves: bool
    """Whether it may give its first argument another address."""
    changes: bool
    """Whether it writes to an argument."""
    arguments: tuple[tuple[str, Any], ...]
    """Names and defaults of all arguments."""
    named: tuple[str, ...]
    """The arguments at the end that are passed by name alone."""
    places: tuple[int, ...]
    """The position of each argument that is a tensor or a list of them."""
    tensors: tuple[tuple[int, bool], ...]
    """The position of each argument whose memory is used, and whether it is written. Views use none."""

    @classmethod
    def of(cls, op: Any) -> OperatorSchema:
        known = _known.get(id(op))
        if known is not None:
            return known
        schema = op._schema
        arguments = tuple((one.name, one.default_value) for one in schema.arguments)
        named = tuple(one.name for one in schema.arguments if one.kwarg_only)
        changes = any(map(_is_written, schema.arguments))
        moves = _short(schema) in _MOVES
        places = tuple(at for at, one in enumerate(schema.arguments) if "Tensor" in str(one.type))
        return _known.setdefault(id(op), cls(op, moves, changes, arguments, named, places, _used(schema, places)))

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments, defaults included."""
        return (*args, *[kwargs.get(name, default) for name, default in self.arguments[len(args) :]])

    def uses(self, args: Sequence[Any]) -> Iterator[tuple[Tensor, bool]]:
        """The tensors whose memory a call with these arguments, in order, uses, and whether it writes them."""
        for position, written in self.tensors:
            value = args[position]
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, Tensor):  # a number may stand in for one
                    yield one, written


_known: dict[int, OperatorSchema] = {}
"""The known operators by id: an operator's own hash is slow."""


def _short(schema: Any) -> str:
    return str(schema.name).partition("::")[2]


def _only_looks(schema: Any) -> bool:
    """Return whether an operator uses no more of its tensors than shape, type and bookkeeping."""
    space, _, name = str(schema.name).partition("::")
    by_shape = name.endswith("_like") or name.startswith(("new_", "sym_"))
    return name in _BOOKKEEPING or (by_shape and space in ("aten", "prims"))


def _is_written(part: Any) -> bool:
    return part.alias_info is not None and bool(part.alias_info.is_write)


def _used(schema: Any, places: Sequence[int]) -> tuple[tuple[int, bool], ...]:
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return () if is_view or _only_looks(schema) else tuple((at, _is_written(schema.arguments[at])) for at in places)
