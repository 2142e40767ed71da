"""The end of a step in Triton: flags, tokens into the history, lengths, the outbox. One launch."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.base.params import MAX_STOP_IDS
from gapless.base.records import NO_TOKEN, Flag
from gapless.kernels import layout as L
from gapless.kernels.library_triton import all_stored, arch, lanes, operator
from gapless.kernels.unpack import unpacked

_GENERATION, _ACTIVE, _LENGTH = tl.constexpr(L.GENERATION), tl.constexpr(L.ACTIVE), tl.constexpr(L.LENGTH)
_COMPUTED, _STATE = tl.constexpr(L.COMPUTED), tl.constexpr(L.STATE_COLUMNS)
_MAX_LEN, _STOP_IDS, _PARAMS = tl.constexpr(L.MAX_LEN), tl.constexpr(L.STOP_IDS), tl.constexpr(L.PARAM_COLUMNS)
_STOPS, _NO_TOKEN = tl.constexpr(MAX_STOP_IDS), tl.constexpr(NO_TOKEN)
_STEP, _SLOT, _TOKENS = tl.constexpr(L.PACKET_STEP), tl.constexpr(L.PACKET_SLOT), tl.constexpr(L.LINE_TOKENS)
_LINE_ROW, _LINE_GENERATION = tl.constexpr(L.LINE_ROW), tl.constexpr(L.LINE_GENERATION)
_LINE_FLAG, _LATE = tl.constexpr(L.LINE_FLAG), tl.constexpr(L.LATE)
_LIVE, _STOP, _END = tl.constexpr(int(Flag.LIVE)), tl.constexpr(int(Flag.STOP)), tl.constexpr(int(Flag.LENGTH))
_MAX_STEP = tl.constexpr(L.MAX_STEP_WORD)
_ERROR, _INERT = tl.constexpr(int(Flag.ERROR)), tl.constexpr(int(Flag.INERT))
_HELD = tl.constexpr(int(Flag.HELD))


def stops_at_once(block: int) -> int:
    """Return the number of stop ids of a row that a program of `block` rows compares at once, limited by its
    registers."""
    return 4 if block < 1024 else 2


@triton.jit
def _stops(param, token, sampled, GROUP: tl.constexpr):
    """Return whether a row's token is one of its stop ids."""
    found = tl.zeros_like(sampled)
    for start in tl.static_range(0, _STOPS, GROUP):
        ids = param[:, None] + _STOP_IDS + start + tl.arange(0, GROUP)[None, :]
        equal = tl.load(ids, mask=sampled[:, None], other=_NO_TOKEN) == token[:, None]
        found |= tl.max(equal.to(tl.int32), axis=1) != 0
    return found


@triton.jit
def _publish(words, state, outbox, number, slot, slots, samples, LINE: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the header of the outbox after its lines, and the numbers of the next step and slot."""
    # The host reads after the event of this step. If it ever polls, the header must still come after the lines, which
    # may be in its memory: hence a barrier, a fence for the whole system (an addition of 0 to the null row), and
    # another barrier, since one thread carries the fence for all.
    all_stored()
    tl.store(words + _STEP, (number + 1) & _MAX_STEP)  # every thread has read them
    tl.store(words + _SLOT, (slot + 1) % slots)
    tl.atomic_add(state + _GENERATION, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    column = tl.arange(0, COLUMNS)[None, :]
    header = tl.where(column == 0, number, tl.where(column == 1, samples, 0))
    tl.store(outbox + column, header, mask=column < LINE)


@triton.jit(
    do_not_specialize=["count", "samples", "slots", "slot_words"], do_not_specialize_on_alignment=["rows", "sizes"]
)
def finish_kernel(
    words, rows, sizes, tokens, finite, state, settings, history, lines, out, count, samples, slots, slot_words,
    HISTORY: tl.constexpr, SIZES: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Ends the step in one program, so that the header can follow all lines. COLUMNS: LINE as a power of two."""
    number, slot = tl.load(words + _STEP), tl.load(words + _SLOT)
    outbox = lines + slot.to(tl.int64) * slot_words
    column = tl.arange(0, COLUMNS)[None, :]
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside, sampled = index < count, index < samples
        row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
        line, param = state + row * _STATE, settings + row * _PARAMS
        active = inside & (tl.load(line + _ACTIVE, mask=inside, other=0) != 0)
        computed = tl.load(line + _COMPUTED, mask=inside, other=0)
        length = tl.load(line + _LENGTH, mask=inside, other=0)
        good = tl.load(finite + index, mask=sampled, other=0) != 0
        longest = tl.load(param + _MAX_LEN, mask=sampled, other=0)
        step = tl.full([BLOCK], 1, tl.int32)
        if SIZES:
            step = tl.load(sizes + index, mask=inside, other=0)

        flag = tl.where(active, tl.where(good, _HELD, _ERROR), _INERT)
        going = active & good & (tl.load(line + _LATE, mask=inside, other=0) == 0)
        given = tl.full([BLOCK, COLUMNS], _NO_TOKEN, tl.int32)
        for place in tl.static_range(WIDTH):
            token = tl.load(tokens + index * WIDTH + place, mask=sampled, other=_NO_TOKEN).to(tl.int32)
            going &= token >= 0
            token = tl.where(going, token, tl.minimum(token, _NO_TOKEN))
            stops = _stops(param, token, sampled, GROUP)
            tl.store(history + row * HISTORY + length, token, mask=going)
            length += going.to(tl.int32)
            ends = tl.where(stops, _STOP, tl.where(length >= longest, _END, _LIVE))
            flag = tl.where(going, ends, flag)
            going &= flag == _LIVE
            given = tl.where(column == _TOKENS + place, token[:, None], given)
            tl.store(out + index * WIDTH + place, token, mask=sampled)

        generation = tl.load(line + _GENERATION, mask=inside, other=0)
        # An inert row stays unchanged. All threads have read the words written now.
        tl.debug_barrier()
        tl.store(line + _COMPUTED, tl.where(sampled, length - 1, computed + step), mask=active)
        tl.store(line + _LENGTH, length, mask=active & sampled)
        tl.store(line + _ACTIVE, tl.zeros_like(flag), mask=active & sampled & (flag != _LIVE) & (flag != _HELD))

        # A line of one token is one store of 16 bytes, since it may cross the bus.
        given = tl.where(column == _LINE_FLAG, flag[:, None], given)
        given = tl.where(column == _LINE_GENERATION, generation[:, None], given)
        given = tl.where(column == _LINE_ROW, row.to(tl.int32)[:, None], given)
        place = outbox + (1 + index)[:, None] * LINE + column
        tl.store(place, given, mask=sampled[:, None] & (column < LINE))

    _publish(words, state, outbox, number, slot, slots, samples, LINE, COLUMNS)


def _finish(
    words: Tensor, rows: Tensor, sizes: Tensor | None, tokens: Tensor, finite: Tensor, state: Tensor, params: Tensor,
    history: Tensor, lines: Tensor, out: Tensor,
) -> None:  # fmt: skip
    for table in (words, tokens, state, params, history, out):
        assert table.is_contiguous()
    count, (samples, width) = rows.shape[0], tokens.shape
    line, block = L.line_words(width), lanes(count)
    # A line begins and ends at a multiple of 16 bytes.
    assert lines.stride(1) == 1 and lines.stride(0) % 4 == 0 and lines.shape[1] >= (1 + samples) * line
    finish_kernel[(1,)](
        words, rows, rows if sizes is None else sizes, tokens, finite, state, params, history, lines, out,
        count, samples, lines.shape[0], lines.stride(0), history.shape[1], sizes is not None, width, line,
        triton.next_power_of_2(line), block, stops_at_once(block), num_warps=block // arch(state.device).warp,
    )  # fmt: skip


finish = unpacked(operator(_finish, "words", "state", "history", "lines", "out"))
