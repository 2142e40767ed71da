"""The seam of the kernels: one record of callables, chosen once for a device.

T query tokens, B rows, N sampled rows (the first N of the batch), H hidden, Q query heads and K key heads of D. No
callable reads a device value on the host; every shape follows from the host's shapes and integers. Tensors that belong
together are passed as one of the `views`. A record of callables and no class with methods: a torch operator fits in
directly, None marks a missing operation, and `_replace` makes a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gapless.comm.seam import Group
from gapless.kernels.adapt import AdapterPart, adapt
from gapless.kernels.adjust import adjust
from gapless.kernels.drafts import ask, keep_drafts
from gapless.kernels.kinds import Activation, WeightKind
from gapless.kernels.masks import mask, reply
from gapless.kernels.matrix import Linear, Matrix
from gapless.kernels.pages import copy_pages
from gapless.kernels.suffixes import recall, remember
from gapless.kernels.tables import Adjustments, Tables
from gapless.kernels.views import KV, Attend, Counts, Filters, LayerRows, Recall, Rotation, RowBatch


class DecodeBatch(NamedTuple):
    """The inputs of a forward of decode rows, one query token a row. All int64 [B].

    An inert row has slot 0, in the null page, a KV length of 1, and a valid token.
    """

    rows: Tensor
    ids: Tensor
    positions: Tensor
    slots: Tensor
    """page * page_size + offset of the token's KV"""
    kv_lens: Tensor
    """KV entries readable by the row, its own included"""


class MixedBatch(NamedTuple):
    """The inputs of a forward of decode rows and chunks: B rows, T tokens, all int64. Inert rows as in DecodeBatch."""

    rows: Tensor
    last: Tensor
    """[B] index of the row's last query token; any index for a row without tokens"""
    kv_lens: Tensor
    starts: Tensor
    """[B + 1] start of each row's query tokens, and the end of the last's"""
    ids: Tensor
    """[T] token ids; the next two are [T] too"""
    positions: Tensor
    slots: Tensor


class LayerProduct(NamedTuple):
    """A product of a layer, with the tables of its adapters."""

    linear: Linear
    part: AdapterPart | None = None


class LayerOps(Protocol):
    """The operations on T rows of a step. Made for one forward, around its residual stream.

    `y` below is what `norm` or `add` returned: rows [T, H] whose norm may not be done yet.
    """

    @property
    def x(self) -> Tensor:
        """The residual stream [T, H]: the rows given plus every added product, each sum rounded to their dtype."""
        ...

    def norm(self, weight: Tensor) -> Any:
        """Norm x for the first product."""
        ...

    def product(self, y: Any, product: LayerProduct) -> Any:
        """Return the product of normed rows with the terms of their adapters, for `attend`: queries, keys, values."""
        ...

    def attend(self, qkv: Any, rotation: Rotation, layer: int, attend: Attend) -> Tensor:
        """Rotate queries and keys, write keys and values of a layer, and return the attention [T, Q * D]."""
        ...

    def add(self, y: Tensor, product: LayerProduct, norm: Tensor) -> Any:
        """Add the product of y [T, in] to x in place, with the terms of adapters, and norm the sum."""
        ...

    def gated(self, y: Any, product: LayerProduct) -> Tensor:
        """Return silu(left half) * right half of the product [T, 2I] of normed rows, with the terms of their adapters:
        [T, I]."""
        ...

    def end(self, y: Any) -> Tensor:
        """Return normed rows [T, H]."""
        ...


class FastWay(NamedTuple):
    """A faster way through the layers of decode steps, for rows of one token each.

    A row's result may depend on the number of rows, and in attention on all lengths; not on other rows' contents.
    """

    make: Callable[[Tensor, LayerRows, float], LayerOps]
    """(x, rows, eps of the norms)"""
    most: Callable[[Sequence[LayerProduct]], int]
    """Returns the most rows that a model of these products runs this way, 0 for none"""
    adapts: bool = False
    """Whether it serves steps with adapters, or only steps without"""
    shared: Callable[[Group, Tensor, LayerRows, float], LayerOps] | None = None
    """Makes the operations of a rank with a share of each layer's heads and MLP; None: such ranks go another way"""


def join(a: Tensor, b: Tensor) -> Tensor:
    """See `Kernels.join`."""
    return torch.cat((a, b))


class Kernels(NamedTuple):
    """One implementation of every fused operation."""

    name: str
    """torch, triton or native"""
    products: Mapping[WeightKind, type[Linear]]
    """The products by weights of some kinds, dense ones at least"""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [T, H], weight float32 [H], eps) -> [T, H], computed in float32"""
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    """(x [T, H], weight and bias float32 [H] or None, eps) -> [T, H], computed in float32"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x [T, H], delta [T, H], weight, eps): x += delta in place, rounded to x's dtype; returns the norm of the sum"""
    angles: Callable[[Tensor, Tensor], Tensor]
    """(positions int64 [T], table float32 [max_len, D], cosines left and sines right) -> float32 [T, D], the rows of
    the table for `Rotation`. A position past the end, which an inert row may have, gets the last row."""
    rope_and_write: Callable[[Tensor, Rotation, KV, Tensor], None]
    """(qkv [T, Q + 2K, D], rotation, kv, slots int64 [T]): norms and rotates queries and keys in place, then
    writes keys and values to the cache. Computed in float32. Tokens of inert rows write to the null page."""
    activate: Callable[[Tensor, Activation, bool], Tensor]
    """(x, kind, gated) -> [T, I], computed in float32: of gated x [T, 2I] the function of the left half times the right
    half, else the function of x [T, I]"""
    decode_attention: Callable[[Tensor, KV, RowBatch, Attend], Tensor]
    """(q [B, Q, D], kv, batch of B rows, attend) -> [B, Q * D] in q's dtype, computed in float32. q may be a strided
    view."""
    prefill_attention: Callable[[Tensor, KV, RowBatch, Attend, int], Tensor]
    """(q [T, Q, D], kv, batch of C rows with their starts in q, attend, max_query) -> [T, Q * D]: attention of C
    chunks of at most `max_query` tokens. A token past the last chunk's end is padding; its result is undefined."""
    cut: Callable[[Tensor, Tensor, Tensor, Tables, Filters], None]
    """(logits [P * N, vocab] of any float dtype, index int32 [F], rows int32 [N], tables, filters of any listed row):
    for each row rows[index[i] % N], finds the cut of its top-k, top-p and min-p after its first index[i] // N drafts,
    and writes it to CUT_VALUE and CUT_ID of that place in `state`. Tokens rank by logit, equal ones by id; masked
    tokens and stop ids below the minimum length are excluded first; top-p counts the tokens left by top-k; the best
    token always stays. The cut of a row without filters, which may be listed beside others, keeps the tokens of any
    logits. An entry of the null row, or equal to the entry before it, is padding: it writes nothing."""
    sample: Callable[[Tensor, Tensor, Tables, Tensor | None], tuple[Tensor, Tensor]]
    """(logits [P * N, vocab] of any float dtype, rows int32 [N], tables, adjusted float32 [P, slots, vocab] or None) ->
    tokens int64 [P * N], and bool [P * N] whether some logit is finite and none NaN or +inf. A row with a slot
    (ADJUST_SLOT) has the logits of that slot instead of its own, and a MASKED one that is not LATE only tokens of its
    mask at that place. Logits p * N + n are for the place p of row n, after its first p drafts; results after its last
    draft are undefined. A row draws by its temperature among the tokens kept by its cut, or takes the best at
    temperature 0; below the minimum length stop ids are excluded. Implementations agree except for scores that tie in
    the last bits of a logarithm."""
    begin_decode: Callable[[Tensor, Counts, Tables, int], DecodeBatch]
    """(packet words int32, counts, tables, page_size): writes the packet's pages to the page table, then gathers the
    batch. For packets of decode rows alone, without admissions. Slots are the first page group's. With P places a row,
    p * B + b is the place p of row b: its last token, then its drafts; later places are inert."""
    finish: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tables, Tensor, Tensor], None]
    """(packet words, rows [B], sizes [B] or None, tokens int64 [N, W], finite [N], tables, lines [slots, M], out [N,
    W]), int32 unless stated: ends the step. A row takes its tokens from the left up to a NO_TOKEN, a stop id or its
    greatest length, any REJECTED as NO_TOKEN; they enter its history, lengths advance, finished rows become inert. A
    row that sampled then has computed = length - 1, so one that took none (held) runs its last position again; other
    rows advance by their size. A LATE row takes none. The outbox's header and lines go to `lines` at the packet's slot,
    and the packet advances to the next step and slot. `out` gets the taken tokens, NO_TOKEN after them. Sizes are query
    tokens a row, 1 if None."""
    score: Callable[[Tensor, Tensor, Tensor, Tensor, Tables, Tensor, int, int], None]
    """(logits [P * R, vocab] of any float dtype, index int32 [S], packet words, tokens int32 [R, W], tables, outboxes
    int32 [slots, M], start, width), after `finish`: scores the new token index[i] // R of each row index[i] % R of the
    packet, from its raw logits in float32. A line of `layout.score_words(width)` words an entry goes to the step's
    outbox, from word `start` on. Rank and the `width` most likely tokens go by logit, equal ones by id. Position -1
    marks a missing token, whose line is otherwise undefined after the first place; NaN marks logits that are not
    finite, NO_TOKEN and -inf the end of a small vocabulary."""
    accept: Callable[[Tensor, Tensor, Tensor, Tables, int], Tensor]
    """(tokens int64 [P * N] and finite bool [P * N] from `sample`, rows int32 [N], tables, W), before `finish`: ->
    tokens int64 [N, W] of each row: the first, then each after a right draft with finite logits; REJECTED in the
    places of other drafts, NO_TOKEN after them. With one place, RIGHT or REJECTED follows the token of a row that
    had a draft."""
    look_up: Callable[[Tensor, Tables, int, int, int], Tensor]
    """(rows int32 [N], tables, most, shortest, longest), after `finish`: drafts the tokens that followed the last
    occurrence of the longest matching end of the row's history, of `shortest` to `longest` tokens; as many as `most`,
    the row's DRAFTS and its greatest length allow. The continuation may reach into the drafts themselves. -> int32 [N],
    the length of that end, 0 for a row without drafts."""
    begin_mixed: Callable[[Tensor, Counts, Tables, int], MixedBatch] | None = None
    """(packet words int32, counts, tables, page_size): does the work of `begin_decode` for packets with chunks and new
    rows, whose prompt tokens enter the history. The places of decode rows come first, as in `begin_decode`.
    counts.tokens may exceed the rows' tokens: the others have id, position and slot 0. None: the step calls torch."""
    ask: Callable[[Tensor, Tables, int], None] = ask
    """(rows int32 [N], tables, drafts), before the inputs of a step with a drafting model are made: writes DRAFTED, up
    to `drafts` beyond the length as a row's DRAFTS and greatest length allow."""
    draft: Callable[[Tensor, Tensor | None, Tensor, Tables, int, int], Tensor] | None = None
    """(logits [B, M] of any float dtype, ids int64 [M] or None, rows int64 [B], tables, place, vocab): the draft of
    each row after `place` others -> int64 [B], drawn as by `sample` from logits of the tokens `ids`, or of all `vocab`,
    by the row's temperature and noise, without cuts, masks and adjustments. None: `sample` draws, from tables made for
    it."""
    keep_drafts: Callable[[Tensor, Tensor, Tensor, Tensor, Tables], None] = keep_drafts
    """(ids, positions, rows, slots, all int64 [T], tables): writes drafts to the histories of their rows; drafts of
    slot 0, which belong to no row, to the null row's first token."""
    join: Callable[[Tensor, Tensor], Tensor] = join
    """(a [M, W], b [N, W]) -> [M + N, W], on a CPU by the kernels' own threads: torch's would spin on their cores."""
    adjust: Callable[[Tensor, Tensor, Tensor, Tables, Adjustments], None] = adjust
    """(logits [P * N, vocab] of any float dtype, index int32 [F], rows int32 [N], tables, adjustments): writes the
    adjusted logits of each row rows[index[i]] to its slot, at each of its places: biases first, then repetition,
    frequency and presence penalties over the row's history, then -inf outside a list of allowed ids, and BANNED at the
    last tokens of bad words whose other tokens end the output. For rows with penalties or processors, it first counts
    the new tokens of the history. Padding as in `cut`; a row without a slot is left out."""
    mask: Callable[[Tensor, Tensor, Tables, Tensor, int], None] = mask
    """(index int32 [F], rows int32 [N], tables, mail int32 [rows, M], places), before any other use of masks: for each
    MASKED row rows[index[i]], checks whether its mail has the mask of its next token. If so, that becomes its mask in
    the tables; if not, the row is LATE, and `finish` holds it. The same at later places, up to its drafts; DRAFTED of a
    row that is not late then leaves out the drafts without a mask. Padding as in `cut`; an entry of another row is left
    out."""
    reply: Callable[[Tensor, Tensor, Tensor, Tables, Tensor, int, int], None] = reply
    """(index, rows, tokens int32 [R, W], tables, mail, drafts, most), after `finish`, whose `out` are the tokens, and
    after drafting: writes the new tokens of each such row, and up to `drafts` of its drafts, to its mail, if the row
    continues. Before that, a row that got its mail's expected tokens gets the next expected ones as its drafts, up to
    `most`, unless its drafts begin with them."""
    adapt: Callable[[Tensor, Tensor, Tensor, AdapterPart], None] = adapt
    """(x [T, in], y [T, out], slots int64 [T], part): y += (x @ down.T) @ up in place, with the tables of each token's
    slot, a projection's columns by its own ranks; unchanged numbers for tokens of slot 0."""
    remember: Callable[[Tensor, Tensor, Tables, Tensor], None] = remember
    """(rows int32 [N], tokens int32 [N, W], tables, suffixes int32 [lengths, entries + 1, SUFFIX_WORDS]), after
    `finish`, whose `out` are the tokens: records for the TENANT of each row the token that followed the tokens before
    it, for each length in SUFFIX_LENGTHS. An entry keeps one token; a token that followed more often lately takes it
    over, and so does any other end of a history with its digest. Of rows that write to one entry in the same place of
    their tokens, the last in `rows` wins. The last entry of each length is undefined."""
    recall: Callable[[Tensor, Tensor, Tables, Tensor, Recall], None] = recall
    """(rows int32 [N], same int32 [N], tables, suffixes, recall), after `look_up` with its result `same`: drafts the
    TENANT's recorded token after the longest recorded end of the row's history, then after that end with the draft, and
    so on, if the first of these ends is longer than `same`. Other rows keep their drafts. All are cut to the bounds of
    `Recall`."""
    copy_pages: Callable[[Tensor, Tensor, Tensor, Tensor], None] = copy_pages
    """(src, dst, both [pages, words] of int32, int16 or uint8, places int32 [2, count] in host memory, sums int64
    [count]): row places[1] of dst becomes row places[0] of src, and sums += the checksums of the copied rows, as
    defined in `pages`. On a GPU src or dst is pinned host memory; sums is on the copying device."""
    stores_on_host: bool = False
    """Whether `finish`, `score`, `mask` and `reply` on a device can write and read pinned host memory."""
    ways: tuple[FastWay, ...] = ()
    """Faster ways through layers: the first one that takes a step's rows serves, else `layers.SeparateOps`."""
    ahead: Callable[[], AbstractContextManager[None]] | None = None
    """A context whose programs only compile their kernels, in parallel, finished at its end. None: there is nothing to
    compile."""
    chunk_attention: Callable[[Tensor, KV, RowBatch, Attend, int], Tensor] | None = None
    """(q [T, Q, D], kv, batch of one row, attend, start) -> [T, Q * D]: `prefill_attention` of one chunk, which has
    exactly T tokens, at positions from `start`. Only kernels that gather have it: their `decode_attention` reads as
    many entries as the page table is wide, so they are passed the part of it that covers a batch."""

    @property
    def bounded(self) -> bool:
        """Return whether shapes on the device depend on a batch's bound of KV lengths."""
        return self.chunk_attention is not None

    def linear(self, matrix: Matrix) -> Linear:
        """Make the product by a weight: multiplied out if there is none for its kind."""
        product = self.products.get(matrix.layout.kind)
        found = product.of(matrix) if product else None
        if found is None:
            found = self.products[WeightKind.DENSE].of(matrix.multiplied_out())
        assert found is not None, "dense weights have a product"
        return found
