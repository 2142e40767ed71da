"""Adjusted logits in Triton: each program has a part of the vocabulary, of counts as of logits.

So programs are independent. Each counts the new tokens of its part, in steady steps one token; then it writes the
penalized logits to the row's slot, and changes them by the row's lists. Logits after drafts are a separate launch,
after all counts.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.base.params import MAX_BIASES
from gapless.kernels import layout as L
from gapless.kernels.adjust import PENALTIES
from gapless.kernels.library_triton import operator
from gapless.kernels.tables import COUNTED_TILE
from gapless.kernels.unpack import unpacked

_STATE, _PARAMS, _WISH_WORDS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS), tl.constexpr(L.WISH_WORDS)
_SLOT, _LENGTH, _TILE = tl.constexpr(L.ADJUST_SLOT), tl.constexpr(L.LENGTH), tl.constexpr(COUNTED_TILE)
_DRAFTED = tl.constexpr(L.DRAFTED)
_REPETITION, _FREQUENCY, _PRESENCE = map(tl.constexpr, PENALTIES)
_BIASES, _ALLOWED, _BAD_WORDS = tl.constexpr(L.BIASES), tl.constexpr(L.ALLOWED), tl.constexpr(L.BAD_WORDS)
_OUTPUT, _WISHES, _LIST = tl.constexpr(L.OUTPUT), tl.constexpr(L.WISHES), tl.constexpr(MAX_BIASES)
_PROCESSORS = tl.constexpr(L.PROCESSORS)
_IN_PROMPT, _BANNED, _MOST_WORDS = tl.constexpr(L.IN_PROMPT), tl.constexpr(L.BANNED), tl.constexpr(L.MOST_BAD_WORDS)


@triton.jit
def _real(param, COLUMN: tl.constexpr):
    return tl.load(param + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _count(history, counts, start, length, output, first, BLOCK: tl.constexpr):
    """Count the tokens from `start` on in the part of the vocabulary from `first` on."""
    for at in range(start, length, BLOCK):
        place = at + tl.arange(0, BLOCK)
        token = tl.load(history + place, mask=place < length, other=-1)
        mine = (token >= first) & (token < first + _TILE)
        tl.atomic_or(counts + token, _IN_PROMPT, mask=mine & (place < output), sem="relaxed")
        tl.atomic_add(counts + token, 1, mask=mine & (place >= output), sem="relaxed")


@triton.jit
def _penalized(x, count, repetition, frequency, presence):
    seen = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    output = count & (_IN_PROMPT - 1)
    x = tl.where(count > 0, seen, x)
    return x - frequency * output.to(tl.float32) - tl.where(output > 0, presence, 0.0)


@triton.jit
def _ids(list, count, first, VOCAB: tl.constexpr):
    """Return the tokens of a list, and whether each is in this program's part of the vocabulary."""
    place = tl.arange(0, _LIST)
    token = tl.load(list + place, mask=place < count, other=-1)
    return token, (token >= first) & (token < tl.minimum(first + _TILE, VOCAB))


@triton.jit
def _ban(x, history, output, ends, tokens, words, first, VOCAB: tl.constexpr):
    """Ban the last tokens of words whose other tokens end the output, which begins at `output`; `history` is its end.

    All words are compared at once, token by token.
    """
    word = tl.arange(0, _MOST_WORDS)
    end = tl.load(ends + word, mask=word < words, other=0)
    begin = tl.load(ends + word - 1, mask=(word > 0) & (word < words), other=0)
    before = end - begin - 1
    same = (word < words) & (before <= output)
    for back in range(1, tl.max(before, axis=0) + 1):
        asked = same & (back <= before)
        known = tl.load(history - back + word * 0, mask=asked, other=-1)
        same &= (back > before) | (tl.load(tokens + end - 1 - back, mask=asked, other=-2) == known)
    last = tl.load(tokens + end - 1, mask=same, other=-1)
    mine = same & (last >= first) & (last < tl.minimum(first + _TILE, VOCAB))
    tl.store(x + last, tl.minimum(tl.load(x + last, mask=mine, other=0.0), _BANNED), mask=mine)


@triton.jit
def _counts(counts, token, mine, drafts, place):
    """Return the counts of a row's tokens, its first `place` drafts included."""
    count = tl.load(counts + token, mask=mine, other=0, cache_modifier=".cg")
    for draft in range(place):
        count += (token == tl.load(drafts + draft)).to(tl.int32)
    return count


@triton.jit
def _adjust(logits, history, length, param, wishes, counts, adjusted, place, first, VOCAB: tl.constexpr):
    """Write the logits of one row after `place` drafts, in a part of the vocabulary."""
    token = first + tl.arange(0, _TILE)
    inside, drafts = token < VOCAB, history + length
    repetition, frequency = _real(param, _REPETITION), _real(param, _FREQUENCY)
    presence = _real(param, _PRESENCE)
    penalizes = _penalizes(param)
    x = tl.load(logits + token, mask=inside, other=0.0).to(tl.float32)
    if penalizes:
        x = _penalized(x, _counts(counts, token, inside, drafts, place), repetition, frequency, presence)
    tl.store(adjusted + token, x, mask=inside)

    output = length + place - tl.load(wishes + _OUTPUT)
    biased, allowed, words = tl.load(wishes + _BIASES), tl.load(wishes + _ALLOWED), tl.load(wishes + _BAD_WORDS)
    wishes += _WISHES
    if biased > 0:
        tl.debug_barrier()
        ids, mine = _ids(wishes, biased, first, VOCAB)
        bias = tl.load(wishes + biased + tl.arange(0, _LIST), mask=mine, other=0).to(tl.float32, bitcast=True)
        y = tl.load(logits + ids, mask=mine, other=0.0).to(tl.float32) + bias
        if penalizes:
            y = _penalized(y, _counts(counts, ids, mine, drafts, place), repetition, frequency, presence)
        tl.store(adjusted + ids, y, mask=mine)
    wishes += 2 * biased
    if allowed > 0:
        tl.debug_barrier()
        ids, mine = _ids(wishes, allowed, first, VOCAB)
        y = tl.load(adjusted + ids, mask=mine, other=0.0)
        tl.debug_barrier()
        tl.store(adjusted + token, tl.full([_TILE], float("-inf"), tl.float32), mask=inside)
        tl.debug_barrier()
        tl.store(adjusted + ids, y, mask=mine)
    wishes += allowed
    if words > 0:
        tl.debug_barrier()
        _ban(adjusted, drafts + place, output, wishes, wishes + words, words, first, VOCAB)


@triton.jit
def _penalizes(param):
    return (_real(param, _REPETITION) != 1.0) | (_real(param, _FREQUENCY) != 0.0) | (_real(param, _PRESENCE) != 0.0)


@triton.jit(do_not_specialize=["batch", "slots"])
def adjust_kernel(
    logits, index, rows, state, settings, history, wishes, counts, counted, adjusted, batch, slots,
    VOCAB: tl.constexpr, HISTORY: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Process one part of a row's vocabulary: its counts and its logits, or with DRAFTS its logits after drafts."""
    entry, tile, place = tl.program_id(0), tl.program_id(1), tl.program_id(2) + DRAFTS
    sample = tl.load(index + entry)
    before = tl.load(index + entry - 1, mask=entry > 0, other=-1)
    row = tl.load(rows + sample).to(tl.int64)
    line, param = state + row * _STATE, settings + row * _PARAMS
    slot, length = tl.load(param + _SLOT).to(tl.int64), tl.load(line + _LENGTH)
    runs = (slot != 0) & (sample != before)
    if DRAFTS:
        runs &= place <= tl.load(line + _DRAFTED) - length
    if runs:
        first = tile * _TILE
        history += row * HISTORY
        wishes += slot * _WISH_WORDS
        counts += slot * VOCAB
        # Processors read the counts too.
        if (DRAFTS == 0) & (_penalizes(param) | (tl.load(wishes + _PROCESSORS) != 0)):
            done = counted + slot * tl.num_programs(1) + tile
            _count(history, counts, tl.load(done), length, tl.load(wishes + _OUTPUT), first, BLOCK)
            tl.debug_barrier()  # all threads have counted, and read the start
            tl.store(done, length)
        logits += (place * batch + sample).to(tl.int64) * VOCAB
        adjusted += (place * slots + slot) * VOCAB
        _adjust(logits, history, length, param, wishes, counts, adjusted, place, first, VOCAB)


ADJUST_BLOCK = 256
"""Tokens of a history read by a program at once"""


def _adjust_logits(
    logits: Tensor, index: Tensor, rows: Tensor, state: Tensor, params: Tensor, history: Tensor, wishes: Tensor,
    counts: Tensor, counted: Tensor, adjusted: Tensor,
) -> None:  # fmt: skip
    for table in (logits, state, params, history, wishes, counts, counted, adjusted):
        assert table.is_contiguous()
    vocab, tiles = logits.shape[1], counted.shape[1]
    assert tiles == triton.cdiv(vocab, COUNTED_TILE)
    batch, given = rows.shape[0], (logits, index, rows, state, params, history, wishes, counts, counted, adjusted)
    # Logits after drafts need all counts of the history.
    for drafts, places in ((0, 1), (1, logits.shape[0] // batch - 1)):
        if places:
            adjust_kernel[(index.shape[0], tiles, places)](
                *given, batch, adjusted.shape[1], vocab, history.shape[1], ADJUST_BLOCK, drafts, num_warps=4
            )


adjust = unpacked(operator(_adjust_logits, "counts", "counted", "adjusted"))
