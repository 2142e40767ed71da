"""Masks in Triton. One program a row decides whether its mask has come; then the tiles of the row take it.

The mail is in pinned host memory. Tags are looked at afresh each time, and masks by another launch, which begins when
the tags have been read: so no mask is older than its tag.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels import layout as L
from gapless.kernels.library_triton import operator
from gapless.kernels.tables import Adjustments, Tables

LOOKS = 16
"""How often a program looks for a late mask: each takes a GPU about a microsecond, across the bus."""
WORDS = 32
"""Words of a mask that a program takes"""

_STATE, _PARAMS, _WISH_WORDS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS), tl.constexpr(L.WISH_WORDS)
_GENERATION, _ACTIVE, _LENGTH = tl.constexpr(L.GENERATION), tl.constexpr(L.ACTIVE), tl.constexpr(L.LENGTH)
_SLOT, _OWNER, _LATE = tl.constexpr(L.ADJUST_SLOT), tl.constexpr(L.OWNER), tl.constexpr(L.LATE)
_TAG, _TOLD, _TOKEN = tl.constexpr(L.MAIL_TAG), tl.constexpr(L.MAIL_TOLD), tl.constexpr(L.MAIL_TOKEN)
_MASK, _NO_TOKEN = tl.constexpr(L.MAIL_MASK), tl.constexpr(L.NO_TOKEN)


@triton.jit
def _masked(index, rows, settings, wishes):
    """The sample of this program's entry, its row, and its slot: 0 where it gets no masks, or is padding."""
    entry = tl.program_id(0)
    sample = tl.load(index + entry)
    before = tl.load(index + entry - 1, mask=entry > 0, other=-1)
    row = tl.load(rows + sample).to(tl.int64)
    slot = tl.load(settings + row * _PARAMS + _SLOT).to(tl.int64)
    masked = (tl.load(wishes + slot * _WISH_WORDS + _OWNER) != 0) & (sample != before)
    return sample, row, tl.where(masked, slot, 0)


@triton.jit
def _tag(line, wishes, slot):
    return (tl.load(wishes + slot * _WISH_WORDS + _OWNER).to(tl.int64) << 32) | tl.load(line + _LENGTH).to(tl.int64)


@triton.jit
def _place(mail, slot, word_count, WORD: tl.constexpr):
    """The address of a tag."""
    return (mail + slot * word_count + WORD).to(tl.pointer_type(tl.int64))


@triton.jit(do_not_specialize=["word_count"], do_not_specialize_on_alignment=["rows"])
def late_kernel(index, rows, state, settings, wishes, mail, word_count, LOOKS: tl.constexpr):
    """Decides for one row whether its mask has come. One that has ended, or was given up, is not waited for."""
    _, row, slot = _masked(index, rows, settings, wishes)
    if slot != 0:
        line = state + row * _STATE
        expected, place = _tag(line, wishes, slot), _place(mail, slot, word_count, _TAG)
        found = tl.load(place, volatile=True)
        if tl.load(line + _ACTIVE) != 0:
            for _ in range(LOOKS):
                if found != expected:
                    found = tl.load(place, volatile=True)
        tl.store(line + _LATE, (found != expected).to(tl.int32))


@triton.jit(do_not_specialize=["word_count"], do_not_specialize_on_alignment=["rows"])
def mask_kernel(
    index, rows, state, settings, wishes, adjusted, mail, word_count, VOCAB: tl.constexpr, WORDS: tl.constexpr
):
    _, row, slot = _masked(index, rows, settings, wishes)
    if slot != 0 and tl.load(state + row * _STATE + _LATE) == 0:
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        words = mail + slot * word_count + _MASK + word
        allowed = tl.load(words, mask=word * 32 < VOCAB, other=-1, cache_modifier=".cv")
        bit = tl.arange(0, 32)[None, :]
        token = word[:, None] * 32 + bit
        banned = ((allowed[:, None] >> bit) & 1) == 0
        none = tl.full([WORDS, 32], float("-inf"), tl.float32)
        tl.store(adjusted + slot * VOCAB + token, none, mask=banned & (token < VOCAB))


@triton.jit(do_not_specialize=["word_count"], do_not_specialize_on_alignment=["rows"])
def reply_kernel(index, rows, tokens, state, settings, wishes, mail, word_count, WIDTH: tl.constexpr):
    sample, row, slot = _masked(index, rows, settings, wishes)
    token = tl.load(tokens + sample * WIDTH)
    line = state + row * _STATE
    if slot != 0 and token != _NO_TOKEN and tl.load(line + _ACTIVE) != 0:
        tl.store(mail + slot * word_count + _TOKEN, token)
        # A fence for the whole system: an addition of nothing to the null row.
        tl.debug_barrier()
        tl.atomic_add(state + _GENERATION, 0, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        tl.store(_place(mail, slot, word_count, _TOLD), _tag(line, wishes, slot))


def _mask(
    index: Tensor, rows: Tensor, state: Tensor, params: Tensor, wishes: Tensor, adjusted: Tensor, mail: Tensor
) -> None:
    _check(state, params, wishes, adjusted, mail)
    count, vocab, given = index.shape[0], adjusted.shape[1], (index, rows, state, params, wishes)
    late_kernel[(count,)](*given, mail, mail.stride(0), LOOKS, num_warps=1)
    tiles = triton.cdiv(L.mask_words(vocab), WORDS)
    mask_kernel[(count, tiles)](*given, adjusted, mail, mail.stride(0), vocab, WORDS, num_warps=4)


def _reply(
    index: Tensor, rows: Tensor, tokens: Tensor, state: Tensor, params: Tensor, wishes: Tensor, mail: Tensor
) -> None:
    _check(state, params, wishes, tokens, mail)
    given, width = (index, rows, tokens, state, params, wishes, mail), tokens.shape[1]
    reply_kernel[(index.shape[0],)](*given, mail.stride(0), width, num_warps=1)


def _check(*tables: Tensor) -> None:
    *whole, mail = tables
    assert all(table.is_contiguous() for table in whole)
    assert mail.stride(1) == 1 and mail.stride(0) % 2 == 0, "a tag is one int64"


triton_mask = operator(
    "triton_mask(Tensor index, Tensor rows, Tensor(a!) state, Tensor params, Tensor wishes, Tensor(b!) adjusted, "
    "Tensor mail) -> ()",
    _mask,
)
triton_reply = operator(
    "triton_reply(Tensor index, Tensor rows, Tensor tokens, Tensor state, Tensor params, Tensor wishes, "
    "Tensor(a!) mail) -> ()",
    _reply,
)


def mask(index: Tensor, rows: Tensor, tables: Tables, slots: Adjustments, mail: Tensor) -> None:
    """See `seam.Kernels.mask`. `mail` may be pinned host memory, which a GPU reads and writes as its own."""
    triton_mask(index, rows, tables.state, tables.params, slots.wishes, slots.logits[0], mail)


def reply(index: Tensor, rows: Tensor, tokens: Tensor, tables: Tables, slots: Adjustments, mail: Tensor) -> None:
    """See `seam.Kernels.reply`. `mail` likewise."""
    triton_reply(index, rows, tokens, tables.state, tables.params, slots.wishes, mail)
