"""The seam of the kernels: one record of callables, chosen once for a device.

T query tokens, B rows, N sampled rows (the first N of the batch), H hidden, Q query heads and K key heads of D.
No callable reads a device value on the host; every shape follows from shapes and integers that the host has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor


class Linear(Protocol):
    """x [T, in] -> x @ weight.T + bias [T, out], with the weight in the layout its device likes best.

    One that can also give the weight's rows `ids` int64 [T] has a method `rows(ids) -> [T, in]`.
    """

    def __call__(self, x: Tensor) -> Tensor: ...


class DecodeBatch(NamedTuple):
    """What a forward of decode rows reads, one query token a row. All int64 [B].

    Inert rows have slot 0, in the null page, and a KV length of 1.
    """

    rows: Tensor
    ids: Tensor
    positions: Tensor
    slots: Tensor
    """page * page_size + offset: where the token's KV goes"""
    kv_lens: Tensor
    """KV entries that the row may read, its own included"""


class MixedBatch(NamedTuple):
    """What a forward of decode rows and chunks reads: B rows, T tokens, all int64. Inert rows as above."""

    rows: Tensor
    sizes: Tensor
    """[B] query tokens"""
    last: Tensor
    """[B] index of the row's last query token"""
    kv_lens: Tensor
    starts: Tensor
    """[B + 1] where each row's query tokens begin, and the end of the last's"""
    ids: Tensor
    """[T] as the next two"""
    positions: Tensor
    slots: Tensor


class FewRows(NamedTuple):
    """A decoder layer for a batch of few rows of one token each, in as few launches as can be.

    A row's result may depend on how many rows there are, but not between one power of two and the next.
    """

    most: int
    """Rows up to which this is the faster way"""
    normed_linear: Callable[[Tensor, Tensor, float, Linear], Tensor]
    """(x [B, H], norm [H], eps, linear) -> linear(rms_norm(x)) [B, out]"""
    normed_silu_mul: Callable[[Tensor, Tensor, float, Linear], Tensor]
    """(x [B, H], norm [H], eps, linear of 2I) -> silu_mul(linear(rms_norm(x))) [B, I]"""
    linear_add: Callable[[Tensor, Tensor, Linear], None]
    """(x [B, out], y [B, in], linear): x += linear(y) in place, rounded to x's dtype"""
    decode: Callable[
        [Tensor, Tensor | None, float, Tensor, Tensor, Tensor, Tensor, int, Tensor, Tensor, Tensor, float], Tensor
    ]
    """(qkv, qk_norm, eps, positions, table, slots, cache, layer, page_table, rows, kv_lens, scale) -> [B, Q * D]:
    `rope_and_write`, then `decode_attention`; what is left in qkv [B, Q + 2K, D] means nothing"""


class Kernels(NamedTuple):
    """One implementation of every fused operation."""

    name: str
    """torch, triton or native"""
    linear: Callable[[Tensor, Tensor | None], Linear]
    """(weight [out, in], bias [out] or None)"""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [T, H], weight [H], eps) -> [T, H], computed in float32"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x [T, H], delta [T, H], weight, eps): x += delta in place, rounded to x's dtype; returns the norm of the sum"""
    rope_and_write: Callable[[Tensor, Tensor | None, float, Tensor, Tensor, Tensor, Tensor, int], None]
    """(qkv [T, Q + 2K, D], qk_norm [Q + K, D] or None, eps, positions [T], table [max_len, D] float32, slots [T],
    cache [pages, layers, 2, page_size, K, D], layer): norms and rotates queries and keys in place, then writes
    keys and values to the cache. The table has cosines left, sines right; positions past its end read its last row."""
    silu_mul: Callable[[Tensor], Tensor]
    """[T, 2I], gate left and up right -> silu(gate) * up [T, I]"""
    decode_attention: Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor, float], Tensor] | None
    """(q [B, Q, D], cache, layer, page_table [R, W] int32, rows [B], kv_lens [B], scale) -> [B, Q * D].
    q may be a strided view. None: the model gathers and calls torch."""
    prefill_attention: Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor, Tensor, float, int], Tensor] | None
    """(q [T, Q, D], cache, layer, page_table, rows [C], starts [C + 1], kv_lens [C], scale, max_query) -> [T, Q * D].
    C chunks; `starts` int64 are offsets of their queries in q; kv_lens count the chunk's own, so an inert row has
    one token or none; causal."""
    sample: Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """(logits [N, vocab] of any float dtype, rows [N], state, params, random) -> tokens int64 [N], and whether the
    row has finite logits. Greedy, or by temperature without filters; as step.sampler, but for scores that tie in the
    last bits of a logarithm."""
    begin_decode: Callable[[Tensor, int, int, Tensor, Tensor, Tensor, int], DecodeBatch]
    """(packet words, rows, page writes, state, history, pages, page_size): writes the packet's pages to the page table,
    then gathers the batch. For packets of decode rows alone."""
    finish: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(packet words, rows [B], sizes [B] or None, tokens [N], finite [N], state, params, history, lines [slots, M]):
    ends the step. Appends tokens, moves lengths, makes finished rows inert, and writes the outbox's header and
    lines to `lines` at the packet's slot; then moves the packet on to the next step and slot. Returns the tokens
    int32 [N], NO_TOKEN where nothing was sampled. Sizes are query tokens a row, 1 where None."""
    begin_mixed: Callable[[Tensor, int, int, int, int, int, Tensor, Tensor, Tensor, Tensor, int], MixedBatch] | None = (
        None
    )
    """(packet words, rows, decode rows, page writes, admissions, tokens T, state, params, history, pages, page_size):
    as `begin_decode` for packets with chunks and new rows; prompt tokens go into the history. T may be more than the
    rows have: tokens behind theirs have id, position and slot 0. None: the step calls torch."""
    stores_home: bool = False
    """Whether `finish` on a device may be given lines in pinned host memory."""
    few_rows: FewRows | None = None
    """None: a batch of few tokens runs as any other."""
