"""Masks in Triton. One program a row checks its mask's tag; then others fetch the mask, a part each.

The mail is in pinned host memory. Tags are read uncached each time, and masks by another launch, which begins after the
tags were read: so no mask is older than its tag.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels.library_triton import all_stored, operator
from gapless.kernels.unpack import unpacked

LOOKS = 16
"""Most looks of a program for a late mask: each takes a GPU about a microsecond, across the bus."""
WORDS = 2048
"""Words of a mask fetched by a program, which cross the bus together"""

_STATE, _PARAMS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS)
_GENERATION, _ACTIVE, _LENGTH = tl.constexpr(L.GENERATION), tl.constexpr(L.ACTIVE), tl.constexpr(L.LENGTH)
_MASKED, _LATE = tl.constexpr(L.MASKED), tl.constexpr(L.LATE)
_TAG, _TOLD, _TOKENS = tl.constexpr(L.MAIL_TAG), tl.constexpr(L.MAIL_TOLD), tl.constexpr(L.MAIL_TOKENS)
_MASK, _NO_TOKEN = tl.constexpr(L.MAIL_MASK), tl.constexpr(NO_TOKEN)
_COUNT, _DRAFTS, _ALONG = tl.constexpr(L.MAIL_DRAFTED), tl.constexpr(L.MAIL_DRAFTS), tl.constexpr(L.MAIL_ALONG)
_DRAFTED, _ASKED, _MAX_LEN = tl.constexpr(L.DRAFTED), tl.constexpr(L.DRAFTS), tl.constexpr(L.MAX_LEN)
_AHEAD, _EXPECTED, _RUN = tl.constexpr(L.MAIL_AHEAD), tl.constexpr(L.MAIL_EXPECTED), tl.constexpr(L.MAIL_RUN)


@triton.jit
def _masked(index, rows, settings):
    """Return the sample of this program's entry, and its row: 0 if it gets no masks, or is padding."""
    entry = tl.program_id(0)
    sample = tl.load(index + entry)
    before = tl.load(index + entry - 1, mask=entry > 0, other=-1)
    row = tl.load(rows + sample).to(tl.int64)
    masked = (tl.load(settings + row * _PARAMS + _MASKED) != 0) & (sample != before)
    return sample, tl.where(masked, row, 0)


@triton.jit
def _tag(line):
    return (tl.load(line + _GENERATION).to(tl.int64) << 32) | tl.load(line + _LENGTH).to(tl.int64)


@triton.jit
def _place(own, WORD: tl.constexpr):
    """The address of a tag in a row's mail."""
    return (own + WORD).to(tl.pointer_type(tl.int64))


@triton.jit
def _fence(state):
    """A fence for the whole system: an addition of nothing to the null row."""
    all_stored()
    tl.atomic_add(state + _GENERATION, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()


@triton.jit
def _drafted(line, PLACES: tl.constexpr):
    """Return the number of drafts that a row runs in a step with PLACES."""
    return tl.minimum(tl.maximum(tl.load(line + _DRAFTED) - tl.load(line + _LENGTH), 0), PLACES - 1)


@triton.jit(do_not_specialize=["mail_words"], do_not_specialize_on_alignment=["rows"])
def late_kernel(
    index, rows, state, settings, history, mail, mail_words,
    HISTORY: tl.constexpr, PLACES: tl.constexpr, LANES: tl.constexpr, LOOKS: tl.constexpr,
):  # fmt: skip
    """Decide for one row whether its mask is ready. Ended or failed rows are not waited for.

    Drafts without ready masks are dropped: they are not waited for either. LANES: more than PLACES, a power of two.
    """
    _, row = _masked(index, rows, settings)
    if row != 0:
        line, own = state + row * _STATE, mail + row * mail_words
        expected, place = _tag(line), _place(own, _TAG)
        found = tl.load(place, volatile=True)
        if tl.load(line + _ACTIVE) != 0:
            for _ in range(LOOKS):
                if found != expected:
                    found = tl.load(place, volatile=True)
        tl.store(line + _LATE, (found != expected).to(tl.int32))
        if PLACES > 1:
            lane, drafted, length = tl.arange(0, LANES), _drafted(line, PLACES), tl.load(line + _LENGTH)
            draft = (lane >= 1) & (lane <= drafted)
            tags = tl.load(place + lane, mask=draft, other=0, volatile=True)
            _fence(state)  # the drafts of masks are read after the tags
            along = tl.load(own + _ALONG + lane - 1, mask=draft, other=0, volatile=True)
            drafts = tl.load(history + row * HISTORY + length + lane - 1, mask=draft, other=_NO_TOKEN)
            there = draft & (tags == expected + lane) & (along == drafts)
            kept = tl.min(tl.where((lane >= 1) & (there == 0), lane, LANES), axis=0) - 1
            tl.store(line + _DRAFTED, length + kept, mask=found == expected)


@triton.jit(do_not_specialize=["mail_words"], do_not_specialize_on_alignment=["rows"])
def fetch_kernel(
    index, rows, state, settings, masks, mail, mail_words,
    ROOM: tl.constexpr, PLACES: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Fetches a part of a mask of COUNT words; each begins at a multiple of ALIGN. ROOM: places of `masks`."""
    _, row = _masked(index, rows, settings)
    line, place = state + row * _STATE, tl.program_id(2)
    if row != 0 and tl.load(line + _LATE) == 0 and place <= _drafted(line, PLACES):
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        own = mail + tl.multiple_of(row * mail_words, ALIGN) + _MASK + tl.multiple_of(place * COUNT, ALIGN)
        words = tl.load(own + word, mask=word < COUNT, cache_modifier=".cv")
        tl.store(masks + tl.multiple_of((row * ROOM + place) * COUNT, ALIGN) + word, words, mask=word < COUNT)


@triton.jit(do_not_specialize=["mail_words"], do_not_specialize_on_alignment=["rows"])
def reply_kernel(
    index, rows, tokens, state, settings, history, mail, mail_words,
    HISTORY: tl.constexpr, WIDTH: tl.constexpr, DRAFTS: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """LANES: WIDTH as a power of two, which is more than DRAFTS and MOST."""
    sample, row = _masked(index, rows, settings)
    line, own = state + row * _STATE, mail + row * mail_words
    if row != 0 and tl.load(tokens + sample * WIDTH) != _NO_TOKEN and tl.load(line + _ACTIVE) != 0:
        lane, count, length = tl.arange(0, LANES), _drafted(line, DRAFTS + 1), tl.load(line + _LENGTH)
        given = tl.load(tokens + sample * WIDTH + lane, mask=lane < WIDTH, other=_NO_TOKEN)
        tl.store(own + _TOKENS + lane, given, mask=lane < WIDTH)
        after, left = history + row * HISTORY + length + lane, 0
        if MOST > 0:
            got = tl.sum((given >= 0).to(tl.int32), axis=0)
            tag = tl.load(_place(own, _AHEAD), volatile=True)
            _fence(state)  # the expected tokens are read after their tag
            run = tl.load(own + _RUN + lane, mask=lane < got, other=0, volatile=True)
            right = tl.sum(((lane < got) & (run != given)).to(tl.int32), axis=0) == 0
            asked = settings + row * _PARAMS
            room = tl.minimum(tl.load(asked + _ASKED), tl.load(asked + _MAX_LEN) - 1 - length)
            left = tl.minimum(tl.minimum(tl.load(own + _EXPECTED, volatile=True) - got, room), MOST)
            left = tl.where(right & (tag == _tag(line) - got), left, 0)
            ahead = tl.load(own + _RUN + got + lane, mask=lane < left, other=0, volatile=True)
            before = tl.load(after, mask=lane < left, other=0)
            others = tl.sum(((lane < left) & (before != ahead)).to(tl.int32), axis=0)
            takes = (left > 0) & ((others > 0) | (_drafted(line, MOST + 1) < left))
            tl.store(after, ahead, mask=lane < left)
            tl.store(line + _DRAFTED, length + left, mask=takes)
            count = tl.where(takes, tl.minimum(left, DRAFTS), count)
        tl.store(own + _COUNT, count)
        drafts = tl.load(after, mask=(lane < count) & (lane >= left), other=0)
        if MOST > 0:
            drafts = tl.where(lane < left, ahead, drafts)
        tl.store(own + _DRAFTS + lane, drafts, mask=lane < count)
        _fence(state)
        tl.store(_place(own, _TOLD), _tag(line))


def _mask(
    index: Tensor, rows: Tensor, state: Tensor, params: Tensor, history: Tensor, masks: Tensor, mail: Tensor,
    places: int,
) -> None:  # fmt: skip
    _check(state, params, history, masks, mail)
    count, (_, room, words), mail_words = index.shape[0], masks.shape, mail.stride(0)
    lanes, align = triton.next_power_of_2(places + 1), 1 if words % 4 or mail_words % 4 else 4
    late_kernel[(count,)](
        index, rows, state, params, history, mail, mail_words, history.shape[1], places, lanes, LOOKS, num_warps=1
    )
    fetch_kernel[(count, triton.cdiv(words, WORDS), places)](
        index, rows, state, params, masks, mail, mail_words, room, places, words, WORDS, align, num_warps=4
    )


def _reply(
    index: Tensor, rows: Tensor, tokens: Tensor, state: Tensor, params: Tensor, history: Tensor, mail: Tensor,
    drafts: int, most: int,
) -> None:  # fmt: skip
    _check(state, params, history, tokens, mail)
    given, width = (index, rows, tokens, state, params, history, mail), tokens.shape[1]
    lanes = triton.next_power_of_2(width)
    reply_kernel[(index.shape[0],)](*given, mail.stride(0), history.shape[1], width, drafts, most, lanes, num_warps=1)


def _check(*tables: Tensor) -> None:
    *whole, mail = tables
    assert all(table.is_contiguous() for table in whole)
    assert mail.stride(1) == 1 and mail.stride(0) % 2 == 0, "a tag is one int64"


mask = unpacked(operator(_mask, "state", "masks"))
reply = unpacked(operator(_reply, "state", "history", "mail"))
