"""Operators of torch behind the seam: the views are unpacked into a flat schema.

Recorder and checkers see what an operator reads and writes by its tensor arguments, so no schema has a view. Unpacking
costs the host time only when a step runs eagerly or is captured, and not in a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gapless.kernels.tables import Adjustments, Tables
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch

Operator = Callable[..., Any]
ROW_TABLES = ("state", "params", "history")
"""Tables with a line for each row that most operators take"""


def unpacked(operator: Operator, tables: tuple[str, ...] = ()) -> Operator:
    """Return an operation of `seam.Kernels` that calls an operator with its own arguments, in their order: in place of
    `Tables` the ones that are named, in place of any other view all its fields."""
    places = [Tables._fields.index(name) for name in tables]

    def call(*args: Any) -> Any:
        flat: list[Any] = []
        for arg in args:  # an eager step calls this for every layer, so the common case comes first
            if not isinstance(arg, tuple):
                flat.append(arg)
            elif isinstance(arg, Tables):
                flat += [arg[place] for place in places]
            else:
                flat += arg
        return operator(*flat)

    return call


def adjust(operator: Operator) -> Callable[[Tensor, Tensor, Tensor, Tables, Adjustments], None]:
    """Return `seam.Kernels.adjust` by an operator (logits, index, rows, state, params, history, wishes, counts,
    counted, adjusted)."""

    def call(logits: Tensor, index: Tensor, rows: Tensor, tables: Tables, slots: Adjustments) -> None:
        operator(logits, index, rows, *tables[:3], slots.wishes, slots.counts, slots.counted, slots.logits)

    return call


def rope_and_write(operator: Operator) -> Callable[[Tensor, Rotation, KV, TokenBatch], None]:
    """`seam.Kernels.rope_and_write` by an operator (qkv, qk_norm, eps, positions, table, slots, cache, layer)."""

    def call(qkv: Tensor, rotation: Rotation, kv: KV, tokens: TokenBatch) -> None:
        qk_norm, eps, table = rotation
        operator(qkv, qk_norm, eps, tokens.positions, table, tokens.slots, kv.cache, kv.layer)

    return call


def decode_attention(operator: Operator) -> Callable[[Tensor, KV, RowBatch, float], Tensor]:
    """`seam.Kernels.decode_attention` by an operator (q, cache, layer, page_table, rows, kv_lens, scale)."""

    def call(q: Tensor, kv: KV, batch: RowBatch, scale: float) -> Tensor:
        found: Tensor = operator(q, *kv, batch.rows, batch.kv_lens, scale)
        return found

    return call


def prefill_attention(operator: Operator) -> Callable[[Tensor, KV, RowBatch, float, int], Tensor]:
    """`seam.Kernels.prefill_attention` by an operator (q, cache, layer, page_table, rows, starts, kv_lens, scale,
    max_query)."""

    def call(q: Tensor, kv: KV, batch: RowBatch, scale: float, max_query: int) -> Tensor:
        found: Tensor = operator(q, *kv, batch.rows, batch.starts, batch.kv_lens, scale, max_query)
        return found

    return call
