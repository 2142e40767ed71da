"""Operators of torch behind the seam: the views are unpacked into a flat schema.

Recorder and checkers see an operator's reads and writes by its tensor arguments, so no schema has a view. Unpacking
costs host time only in an eager or capturing step, and not in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gapless.kernels.views import KV, Attend, Rotation, RowBatch

Operator = Callable[..., Any]


def unpacked(operator: Any) -> Operator:
    """Return an operation of `seam.Kernels` that calls an operator with its arguments in order, and with the fields of
    its views that match the operator's arguments by name."""
    names = [argument.name for argument in operator._schema.arguments]
    places: list[tuple[int, int | None]] = []

    def call(*args: Any) -> Any:
        nonlocal places
        places = places or _places(names, args)
        return operator(*[args[at] if field is None else args[at][field] for at, field in places])

    return call


def _places(names: Sequence[str], args: Sequence[Any]) -> list[tuple[int, int | None]]:
    """Return the source of each argument of an operator: the place of an argument, and of the field if that is a
    view."""
    views = [getattr(arg, "_fields", ()) for arg in args]
    fields = {name: (at, place) for at, view in enumerate(views) for place, name in enumerate(view)}
    whole = iter([at for at, view in enumerate(views) if not view])
    places: list[tuple[int, int | None]] = [fields[name] if name in fields else (next(whole), None) for name in names]
    assert next(whole, None) is None, f"an operator of {names} takes fewer arguments"
    return places


# Operations of every layer have their own functions: in an eager step the host's time for each call counts.


def rope_and_write(operator: Operator) -> Callable[[Tensor, Rotation, KV, Tensor], None]:
    """`seam.Kernels.rope_and_write` by an operator (qkv, qk_norm, eps, angles, slots, cache, layer, scales)."""

    def call(qkv: Tensor, rotation: Rotation, kv: KV, slots: Tensor) -> None:
        operator(qkv, *rotation, slots, kv.cache, kv.layer, kv.scales)

    return call


def decode_attention(operator: Operator) -> Callable[[Tensor, KV, RowBatch, Attend], Tensor]:
    """`seam.Kernels.decode_attention` by an operator (q, *kv, rows, kv_lens, *attend)."""

    def call(q: Tensor, kv: KV, batch: RowBatch, attend: Attend) -> Tensor:
        found: Tensor = operator(q, *kv, batch.rows, batch.kv_lens, *attend)
        return found

    return call


def prefill_attention(operator: Operator) -> Callable[[Tensor, KV, RowBatch, Attend, int], Tensor]:
    """`seam.Kernels.prefill_attention` by an operator (q, *kv, rows, starts, kv_lens, spans, *attend,
    max_query)."""

    def call(q: Tensor, kv: KV, batch: RowBatch, attend: Attend, max_query: int) -> Tensor:
        found: Tensor = operator(q, *kv, batch.rows, batch.starts, batch.kv_lens, batch.spans, *attend, max_query)
        return found

    return call
