"""The seam of the kernels: one record of callables, chosen once for a device.

T query tokens, B rows, N sampled rows (the first N of the batch), H hidden, Q query heads and K key heads of D.
No callable reads a device value on the host; every shape follows from shapes and integers that the host has.
Tensors that belong together come as one of the `views`. A record of callables and no class with methods: an operator of
torch fits in as it is, None says what an implementation does not have, and `_replace` makes a variant.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gapless.kernels.adapt import AdapterPart, Joint, Shrunk, adapt
from gapless.kernels.adjust import adjust
from gapless.kernels.drafts import ask, keep_drafts
from gapless.kernels.masks import mask, reply
from gapless.kernels.pages import copy_pages
from gapless.kernels.suffixes import recall, remember
from gapless.kernels.tables import Adjustments, Tables
from gapless.kernels.views import KV, Counts, Filters, Recall, Rotation, RowBatch, TokenBatch


class Linear(Protocol):
    """x [T, in] -> x @ weight.T + bias [T, out], with the weight in the layout its device likes best.

    The result is written to `out` (contiguous) where it is given, and returned.
    One that can also give the weight's rows `ids` int64 [T] has a method `rows(ids) -> [T, in]`.
    """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class DecodeBatch(NamedTuple):
    """The inputs of a forward of decode rows, one query token a row. All int64 [B].

    An inert row has slot 0, in the null page, a KV length of 1, and a token that an embedding takes.
    """

    rows: Tensor
    ids: Tensor
    positions: Tensor
    slots: Tensor
    """page * page_size + offset: where the token's KV goes"""
    kv_lens: Tensor
    """KV entries that the row may read, its own included"""


class MixedBatch(NamedTuple):
    """The inputs of a forward of decode rows and chunks: B rows, T tokens, all int64. Inert rows as in DecodeBatch."""

    rows: Tensor
    last: Tensor
    """[B] index of the row's last query token; of any token for a row that has none"""
    kv_lens: Tensor
    starts: Tensor
    """[B + 1] where each row's query tokens begin, and the end of the last's"""
    ids: Tensor
    """[T] token ids; the next two are [T] too"""
    positions: Tensor
    slots: Tensor


class AdaptedRows(NamedTuple):
    """A decoder layer of rows of which some have adapters: what these add comes with kernels that run anyway."""

    norm: Callable[
        [Tensor, Shrunk | None, Tensor, float, Tensor, AdapterPart | None], tuple[Tensor, Tensor, Shrunk | None]
    ]
    """(x [B, H], added, norm [H], eps, slots int64 [B], part) -> x with the second half of `added`, rounded to x's
    dtype; rms_norm of that; and the first half of what `part` adds to a product of the norm, if there is one"""
    linear: Callable[[Tensor, Shrunk, Linear], Tensor]
    """(x [B, H], added, linear) -> linear(x) and, unless `rotate` adds it, the second half of `added` [B, out]"""
    rotate: Callable[[Tensor, Shrunk, Rotation, KV, TokenBatch], None] | None
    """(qkv [B, Q + 2K, D], added, rotation, kv, tokens): `rope_and_write` of qkv and the second half of `added`"""
    silu_mul: Callable[[Tensor, Shrunk, Linear], Tensor]
    """(x [B, H], added, linear of 2I) -> silu_mul(linear(x) and the second half of `added`) [B, I]"""
    linear_add: Callable[[Tensor, Tensor, Linear, Tensor, AdapterPart], Shrunk]
    """(x [B, out], y [B, in], linear, slots, part): x += linear(y) in place, rounded to x's dtype; returns the first
    half of what `part` adds"""


class Normable(NamedTuple):
    """Rows whose norm is not finished: a product of them does what is left."""

    rows: Tensor
    """[B, H], times the norm's weight unless that is given here"""
    norm: Tensor | None = None
    """[H] the norm's weight, where the whole norm is left"""
    squares: Tensor | None = None
    """[B, S] float32, sums of squares of each row before that weight, where rows are left to be divided by their root
    mean square. None here and above: the rows are normed."""


class FusedRows(NamedTuple):
    """A decoder layer for a batch of rows of one token each, in as few launches as can be.

    A row's result may depend on how many rows there are, and in attention on the lengths of all; not on what the others
    hold. Of a few rows it does not change between one power of two and the next.
    """

    most: int
    """Rows up to which this is the faster way"""
    serves: Callable[[Linear], bool]
    """Whether it can compute this linear layer, and fast. One row of few takes this way in any case."""
    first: Callable[[Tensor, Tensor, float], Normable]
    """(x [B, H], norm [H], eps) -> what a product of x's norm needs"""
    linear: Callable[[Normable, float, Linear], Tensor]
    """(x, eps, linear) -> linear(rms_norm) [B, out]"""
    silu_mul: Callable[[Normable, float, Linear], Tensor]
    """(x, eps, linear of 2I) -> silu_mul(linear(rms_norm)) [B, I]"""
    linear_add: Callable[[Tensor, Tensor, Linear, Tensor], Normable]
    """(x [B, out], y [B, in], linear, norm [out]): x += linear(y) in place, rounded to x's dtype; returns what a
    product of x's norm needs"""
    decode: Callable[[Tensor, Rotation, KV, TokenBatch, RowBatch, float], Tensor]
    """(qkv [B, Q + 2K, D], rotation, kv, tokens, batch, scale) -> [B, Q * D]: `rope_and_write`, then
    `decode_attention`. The contents of qkv mean nothing afterwards."""
    adapted: AdaptedRows
    """How such a layer runs where rows have adapters"""


class JoinedRows(NamedTuple):
    """A decoder layer of rows of which some have adapters, one token each, where its matrices are large: these have the
    matrices of all adapters below them, so that the first half of what adapters add comes with the products."""

    most: int
    """Rows up to which this is the faster way"""
    serves: Callable[[Linear], bool]
    """Whether it is for models with this linear layer"""
    linear: Callable[[Tensor, Linear, Tensor, AdapterPart], Joint]
    """(x [B, in], linear, slots int64 [B], part), whose `down` is below the matrix in its memory"""
    decode: Callable[[Joint, Rotation, KV, TokenBatch, RowBatch, float], Tensor]
    """`FusedRows.decode` of the sum, also where rows read what other rows write"""
    silu_mul: Callable[[Joint], Tensor]
    """`Kernels.silu_mul` of the sum"""
    add_rms_norm: Callable[[Tensor, Joint, Tensor, float], Tensor]
    """`Kernels.add_rms_norm` of x, the sum, weight and eps"""


def join(a: Tensor, b: Tensor) -> Tensor:
    """See `Kernels.join`."""
    return torch.cat((a, b))


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
    rope_and_write: Callable[[Tensor, Rotation, KV, TokenBatch], None]
    """(qkv [T, Q + 2K, D], rotation, kv, tokens): norms and rotates queries and keys in place, then writes keys and
    values to the cache. Computed in float32. Tokens of inert rows write to the null page."""
    silu_mul: Callable[[Tensor], Tensor]
    """[T, 2I], gate left and up right -> silu(gate) * up [T, I]"""
    decode_attention: Callable[[Tensor, KV, RowBatch, float], Tensor] | None
    """(q [B, Q, D], kv, batch of B rows, scale) -> [B, Q * D] in q's dtype, computed in float32. q may be a strided
    view. None: the model gathers and calls torch."""
    prefill_attention: Callable[[Tensor, KV, RowBatch, float, int], Tensor] | None
    """(q [T, Q, D], kv, batch of C rows with their starts in q, scale, max_query) -> [T, Q * D]: causal attention of C
    chunks of at most `max_query` tokens. A token past the last chunk's end is padding; its result means nothing."""
    cut: Callable[[Tensor, Tensor, Tensor, Tables, Filters], None]
    """(logits [P * N, vocab] of any float dtype, index int32 [F], rows int32 [N], tables, filters that listed rows
    have): for each row rows[index[i] % N], finds where its top-k, top-p and min-p end after its first index[i] // N
    drafts, and writes that to CUT_VALUE and CUT_ID of that place in `state`. Tokens rank by logit, equal ones by id;
    what masks leave out and stop ids below the minimum length are out first; top-p counts what top-k leaves; the best
    token always stays. An entry of the null row, or equal to the entry before it, is padding: it writes nothing."""
    sample: Callable[[Tensor, Tensor, Tables, Tensor | None], tuple[Tensor, Tensor]]
    """(logits [P * N, vocab] of any float dtype, rows int32 [N], tables, adjusted float32 [P, slots, vocab] or None): a
    row with a slot (ADJUST_SLOT) has the logits of that slot instead of its own, and a MASKED one that is not LATE only
    tokens of its mask at that place -> tokens int64 [P * N], and bool [P *
    N] whether some logit is finite and none NaN or +inf. Logits p * N + n are those of the place p of row n, after its
    first p drafts; what places after its last draft give means nothing. A row draws by its temperature among the tokens
    that its cut keeps, or takes the best where that is 0; below the minimum length stop ids are out. Implementations
    agree but for scores that tie in the last bits of a logarithm."""
    begin_decode: Callable[[Tensor, Counts, Tables, int], DecodeBatch]
    """(packet words int32, counts, tables, page_size): writes the packet's pages to the page table, then gathers the
    batch. For packets of decode rows alone, with no admission. Slots are those of the first page group. With P places a
    row, p * B + b is the place p of row b: its last token, then its drafts; places after these are inert."""
    finish: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tables, Tensor, Tensor], None]
    """(packet words, rows [B], sizes [B] or None, tokens int64 [N, W], finite [N], tables, lines [slots, M], out [N,
    W]), int32 where no dtype is given: ends the step. A row takes its tokens from the left up to a NO_TOKEN, a stop id
    or its greatest length, any REJECTED as NO_TOKEN; they go into its history, lengths move, finished rows become
    inert. A row that sampled has computed = length - 1 then, so one that took none (held) runs its last position again;
    the others move by their size. A LATE row takes none. The outbox's header and lines go to `lines` at the packet's
    slot, and the packet moves on to the next step and slot. `out` gets the tokens that were taken, NO_TOKEN after them.
    Sizes are query tokens a row, 1 where None."""
    score: Callable[[Tensor, Tensor, Tensor, Tensor, Tables, Tensor, int, int], None]
    """(logits [P * R, vocab] of any float dtype, index int32 [S], packet words, tokens int32 [R, W], tables, outboxes
    int32 [slots, M], start, width), after `finish`: scores the token index[i] // R that each row index[i] % R of the
    packet got, from its raw logits in float32. A line of `layout.score_words(width)` words an entry goes to the step's
    outbox, from word `start` on. Rank and the `width` most likely tokens go by logit, equal ones by id. Position -1
    where there is no token, which after the first place is all that a line says then; NaN where logits are not finite,
    NO_TOKEN and -inf past the end of a small vocabulary."""
    accept: Callable[[Tensor, Tensor, Tensor, Tables, int], Tensor]
    """(tokens int64 [P * N] and finite bool [P * N] as `sample` gives them, rows int32 [N], tables, W), before
    `finish`: -> tokens int64 [N, W] that each row got: the first, then each whose draft was right and whose logits are
    finite; REJECTED in the places of other drafts, NO_TOKEN after them. With one place, RIGHT or REJECTED follows the
    token of a row that had a draft."""
    look_up: Callable[[Tensor, Tables, int, int, int], Tensor]
    """(rows int32 [N], tables, most, shortest, longest), after `finish`: drafts the tokens that followed when the
    row's history last had the longest end of it that it had before, of `shortest` to `longest` tokens; as many as
    `most`, the row's DRAFTS and its greatest length allow. What follows may reach into the drafts themselves. -> int32
    [N], how many tokens that end has, 0 for a row without drafts."""
    begin_mixed: Callable[[Tensor, Counts, Tables, int], MixedBatch] | None = None
    """(packet words int32, counts, tables, page_size): does the work of `begin_decode` for packets with chunks and new
    rows, whose prompt tokens go into the history. The places of decode rows come first, as those of `begin_decode`.
    counts.tokens may be more than the rows have: the tokens after theirs have id, position and slot 0. None: the step
    calls torch."""
    ask: Callable[[Tensor, Tables, int], None] = ask
    """(rows int32 [N], tables, drafts), before the inputs of a step are made whose model drafts: writes DRAFTED, up to
    `drafts` beyond the length where a row's DRAFTS and greatest length allow."""
    draft: Callable[[Tensor, Tensor | None, Tensor, Tables, int, int], Tensor] | None = None
    """(logits [B, M] of any float dtype, ids int64 [M] or None, rows int64 [B], tables, place, vocab): the draft of
    each row after `place` others -> int64 [B], drawn as `sample` would from logits of the tokens `ids`, or of all
    `vocab`, by the row's temperature and noise; cuts, masks and adjustments do not count. None: `sample` draws, from
    tables that are made for it."""
    keep_drafts: Callable[[Tensor, Tensor, Tensor, Tensor, Tables], None] = keep_drafts
    """(ids, positions, rows, slots, all int64 [T], tables): writes drafts to the histories of their rows; those of
    slot 0, which are no row's, to the null row's first token."""
    join: Callable[[Tensor, Tensor], Tensor] = join
    """(a [M, W], b [N, W]) -> [M + N, W], on a CPU by the kernels' own threads: torch's would spin on their cores."""
    adjust: Callable[[Tensor, Tensor, Tensor, Tables, Adjustments], None] = adjust
    """(logits [P * N, vocab] of any float dtype, index int32 [F], rows int32 [N], tables, adjustments): writes the
    adjusted logits of each row rows[index[i]] to its slot, at each of its places: biases first, then repetition,
    frequency and presence penalties over the row's history, then -inf where only others are allowed, and BANNED at the
    last tokens of bad words that the output ends with otherwise. For rows with penalties or processors, it first counts
    the tokens of the history that came since the last call. Padding as in `cut`; a row without a slot is left out."""
    mask: Callable[[Tensor, Tensor, Tables, Tensor, int], None] = mask
    """(index int32 [F], rows int32 [N], tables, mail int32 [rows, M], places), before any other use of masks: for each
    row rows[index[i]] that is MASKED, looks whether its mail has the mask of its next token. If so, that is its mask in
    the tables; if not, the row is LATE, and `finish` holds it. Likewise at the places after, up to its drafts; DRAFTED
    of a row that is not late then leaves out the drafts without a mask. Padding as in `cut`; an entry of another row is
    left out."""
    reply: Callable[[Tensor, Tensor, Tensor, Tables, Tensor, int, int], None] = reply
    """(index, rows, tokens int32 [R, W], tables, mail, drafts, most), after `finish`, whose `out` are the tokens, and
    after what drafts: writes the tokens that each such row got, and up to `drafts` that it may get next, to its mail,
    if the row goes on. Before that, a row that got the tokens that its mail expects gets those expected next as its
    drafts, up to `most`, unless its drafts begin with them."""
    adapt: Callable[[Tensor, Tensor, Tensor, AdapterPart], None] = adapt
    """(x [T, in], y [T, out], slots int64 [T], part): y += (x @ down.T) @ up in place, with the tables' slot of each
    token, a projection's columns by its own ranks; equal numbers for tokens of slot 0."""
    remember: Callable[[Tensor, Tensor, Tables, Tensor], None] = remember
    """(rows int32 [N], tokens int32 [N, W], tables, suffixes int32 [lengths, entries + 1, SUFFIX_WORDS]), after
    `finish`, whose `out` are the tokens: notes for the TENANT of each row what followed the last tokens before each,
    for each length in SUFFIX_LENGTHS. An entry keeps one token; another one takes it that followed more often lately,
    and so does any other end of a history whose digest leads there. Of rows that write to one entry, in the same place
    of their tokens, the last in `rows` does. The last entry of each length means nothing."""
    recall: Callable[[Tensor, Tensor, Tables, Tensor, Recall], None] = recall
    """(rows int32 [N], same int32 [N], tables, suffixes, what is asked), after `look_up` with its result `same`: drafts
    what the TENANT's answers had after the longest noted end of the row's history, then after that end with the draft,
    and so on, where the first of these ends is longer than `same`. Other rows keep their drafts. All are cut to the
    bounds that `Recall` states."""
    copy_pages: Callable[[Tensor, Tensor, Tensor, Tensor], None] = copy_pages
    """(src, dst, both [pages, words] of int32, int16 or uint8, places int32 [2, count] in host memory, sums int64
    [count]): row places[1] of dst becomes row places[0] of src, and sums += the checksums of what was copied, as
    `pages` defines them. On a GPU src or dst is pinned host memory; sums is on the device that copies."""
    stores_on_host: bool = False
    """Whether `finish`, `score`, `mask` and `reply` on a device may be given pinned host memory to write and read."""
    few_rows: FusedRows | None = None
    """A faster way for batches of few rows. None: they run as any other."""
    many_rows: FusedRows | None = None
    """A faster way for decode batches of more rows. None: they run as any other."""
    joined_rows: JoinedRows | None = None
    """A faster way for decode batches with adapters and large matrices. None: they run as any other."""
    ahead: Callable[[], AbstractContextManager[None]] | None = None
    """A context in which programs only have their kernels compiled, in parallel; its end waits for that. None: there is
    nothing to compile."""
