"""Log-probabilities of sampled tokens in Triton: the vocabulary is spread over programs, and a last program an entry
ends it.

The spread of a row depends on the vocabulary alone, so its bits do not depend on other entries. Tokens compare by whole
numbers in the order (logit, then smaller id first), no two equal: the next best is the greatest below the last.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels.library_triton import operator
from gapless.kernels.unpack import unpacked

SCORE_TILE = 2048
"""Tokens held by a program in registers."""

_GENERATION, _LENGTH, _STATE = tl.constexpr(L.GENERATION), tl.constexpr(L.LENGTH), tl.constexpr(L.STATE_COLUMNS)
_ROWS, _SLOT, _NO_TOKEN = tl.constexpr(L.HEADER_WORDS), tl.constexpr(L.PACKET_SLOT), tl.constexpr(NO_TOKEN)
_ROW, _LINE_GENERATION, _POSITION = (tl.constexpr(at) for at in (L.SCORE_ROW, L.SCORE_GENERATION, L.SCORE_POSITION))
_LOGPROB, _TOP = tl.constexpr(L.SCORE_LOGPROB), tl.constexpr(L.SCORE_TOP)
_NONE = tl.constexpr(-(2**63))
"""A key below all tokens' keys; _NONE_16 for logits of 16 bits."""
_NONE_16 = tl.constexpr(-(2**31))
_ANY_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _in_order(bits, LOW: tl.constexpr):
    """Convert bits of floats to whole numbers in their order, and back. LOW: all bits but the sign."""
    return tl.where(bits < 0, bits ^ LOW, bits)


@triton.jit
def _keys(x, place, COUNT: tl.constexpr):
    """Keys of logits at `place` of COUNT, int32 for 16 bits and int64 for 32: no two are equal."""
    if x.dtype.primitive_bitwidth == 16:
        bits = tl.where(x == 0, 0, x.to(tl.int16, bitcast=True)).to(tl.int32)  # a zero has two signs
        key = _in_order(bits, 0x7FFF) * 65536 + (COUNT - place)
    else:
        bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))
        key = (_in_order(bits, 0x7FFFFFFF).to(tl.int64) << 32) + (COUNT - place)
    return key


@triton.jit
def _token(key, logits, COUNT: tl.constexpr):
    """The logit in float32 and the place of a key of `_keys`."""
    if logits.dtype.element_ty.primitive_bitwidth == 16:
        bits = _in_order(key >> 16, 0x7FFF).to(tl.int16)
        x = bits.to(logits.dtype.element_ty, bitcast=True).to(tl.float32)
        place = COUNT - (key & 0xFFFF)
    else:
        x = _in_order((key >> 32).to(tl.int32), 0x7FFFFFFF).to(tl.float32, bitcast=True)
        place = COUNT - (key & 0x7FFFFFFF).to(tl.int32)
    return x, place


@triton.jit(do_not_specialize=["batch"])
def spread_kernel(
    logits, index, tokens, batch, sums, before, best,
    COLUMNS: tl.constexpr, VOCAB: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Measure a part of a row: greatest logit, sum of exp below it, tokens ranked before the row's own, and the
    best."""
    entry, split = tl.program_id(0), tl.program_id(1)
    sample = tl.load(index + entry).to(tl.int64)
    row, given = logits + sample * VOCAB, tokens + sample % batch * COLUMNS + sample // batch
    # Results after the last token of a row with drafts are undefined.
    if (sample < batch) | (tl.load(given) >= 0):
        place = tl.arange(0, TILE)
        token = split * TILE + place
        raw = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
        target = tl.maximum(tl.load(given), 0)
        own = tl.load(row + target).to(tl.float32)
        x = raw.to(tl.float32)
        top = tl.max(x, axis=0)
        at = entry * SPLITS + split
        tl.store(sums + 2 * at, top)
        # A part of -inf alone sums to 0; NaN or +inf makes the sum NaN.
        tl.store(sums + 2 * at + 1, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0))
        tl.store(before + at, tl.sum(((x > own) | ((x == own) & (token < target))).to(tl.int32), axis=0))
        if WIDTH:
            none = _NONE_16 if raw.dtype.primitive_bitwidth == 16 else _NONE
            key = _keys(raw, place, TILE)
            key = tl.where(token < VOCAB, key, none)
            last = tl.max(key, axis=0)
            for rank in range(WIDTH):
                value, found = _token(last, logits, TILE)
                whole = _keys(value, (split * TILE + found).to(tl.int64), _ANY_ID)
                tl.store(best + at * WIDTH + rank, tl.where(last == none, _NONE, whole))
                last = tl.max(tl.where(key < last, key, none), axis=0)


@triton.jit(do_not_specialize=["batch", "slots", "slot_words", "start"])
def line_kernel(
    logits, index, words, tokens, state, batch, sums, before, best, outboxes, slots, slot_words, start,
    COLUMNS: tl.constexpr, VOCAB: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr,
    LANES: tl.constexpr, BEST_LANES: tl.constexpr, LINE_LANES: tl.constexpr,
):  # fmt: skip
    """Write the line of one entry, from the parts of its row. *_LANES: powers of two."""
    entry = tl.program_id(0)
    sample = tl.load(index + entry).to(tl.int64)
    row, given = tl.load(words + _ROWS + sample % batch), tokens + sample % batch * COLUMNS
    line = state + row.to(tl.int64) * _STATE
    target = tl.load(given + sample // batch)
    own = tl.load(logits + sample * VOCAB + tl.maximum(target, 0)).to(tl.float32)
    position = tl.load(line + _LENGTH) + (sample // batch).to(tl.int32)
    for other in tl.static_range(COLUMNS):
        position -= (tl.load(given + other) >= 0).to(tl.int32)
    position = tl.where(target >= 0, position, -1)

    lane = tl.arange(0, LANES)
    splits = tl.where((sample < batch) | (target >= 0), SPLITS, 0)  # the parts read by `spread_kernel`
    inside, at = lane < splits, entry * SPLITS + lane
    tops = tl.load(sums + 2 * at, mask=inside, other=float("-inf"))
    parts = tl.load(sums + 2 * at + 1, mask=inside, other=0.0)
    top = tl.max(tops, axis=0)
    below = tl.log(tl.sum(parts * tl.exp(tops - top), axis=0))
    rank = 1 + tl.sum(tl.load(before + at, mask=inside, other=0), axis=0)

    column = tl.arange(0, LINE_LANES)
    word = tl.where(column == _ROW, row, rank)
    word = tl.where(column == _LINE_GENERATION, tl.load(line + _GENERATION), word)
    word = tl.where(column == _POSITION, position, word)
    word = tl.where(column == _LOGPROB, (own - top - below).to(tl.int32, bitcast=True), word)
    if WIDTH:
        choice = tl.arange(0, BEST_LANES)
        key = tl.load(best + entry * (SPLITS * WIDTH) + choice, mask=choice < splits * WIDTH, other=_NONE)
        last = tl.max(key, axis=0)
        for place in range(WIDTH):
            value, token = _token(last, sums, _ANY_ID)
            there = last != _NONE
            logprob = tl.where(there, value - top - below, float("-inf"))
            word = tl.where(column == _TOP + place, tl.where(there, token, _NO_TOKEN), word)
            word = tl.where(column == _TOP + WIDTH + place, logprob.to(tl.int32, bitcast=True), word)
            last = tl.max(tl.where(key < last, key, _NONE), axis=0)
    # `finish` has advanced the packet. The line may cross the bus: one store, in order.
    slot = (tl.load(words + _SLOT) + slots - 1) % slots
    tl.store(outboxes + slot.to(tl.int64) * slot_words + start + entry * LINE + column, word, mask=column < LINE)


def _score(
    logits: Tensor, index: Tensor, words: Tensor, tokens: Tensor, state: Tensor, outboxes: Tensor, start: int,
    width: int,
) -> None:  # fmt: skip
    for table in (logits, index, words, tokens, state):
        assert table.is_contiguous()
    entries, vocab, columns = index.shape[0], logits.shape[1], tokens.shape[1]
    line, splits, device = L.score_words(width), triton.cdiv(vocab, SCORE_TILE), logits.device
    assert outboxes.stride(1) == 1 and outboxes.shape[1] >= start + entries * line
    sums = torch.empty(entries, splits, 2, dtype=torch.float32, device=device)
    before = torch.empty(entries, splits, dtype=torch.int32, device=device)
    best = torch.empty(entries, splits, width, dtype=torch.int64, device=device)
    parts = (sums, before, best)
    batch = tokens.shape[0]
    spread_kernel[(entries, splits)](logits, index, tokens, batch, *parts, columns, vocab, SCORE_TILE, splits, width)
    line_kernel[(entries,)](
        logits, index, words, tokens, state, batch, *parts, outboxes, outboxes.shape[0], outboxes.stride(0), start,
        columns, vocab, splits, width, line, triton.next_power_of_2(splits),
        triton.next_power_of_2(max(1, splits * width)), triton.next_power_of_2(line),
    )  # fmt: skip


score = unpacked(operator(_score, "outboxes"))
