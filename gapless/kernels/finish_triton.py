"""The end of a step in Triton: flags, tokens into the history, lengths, the outbox. One launch."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.base.params import MAX_STOP_IDS
from gapless.base.records import Flag
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    GENERATION,
    LENGTH,
    MAX_LEN,
    MAX_STEP_WORD,
    NO_TOKEN,
    OUTBOX_COLUMNS,
    PACKET_SLOT,
    PACKET_STEP,
    PARAM_COLUMNS,
    STATE_COLUMNS,
    STOP_IDS,
)  # fmt: skip
from gapless.kernels.library_triton import lanes, operator

_GENERATION, _ACTIVE, _LENGTH = tl.constexpr(GENERATION), tl.constexpr(ACTIVE), tl.constexpr(LENGTH)
_COMPUTED, _STATE = tl.constexpr(COMPUTED), tl.constexpr(STATE_COLUMNS)
_MAX_LEN, _STOP_IDS, _PARAMS = tl.constexpr(MAX_LEN), tl.constexpr(STOP_IDS), tl.constexpr(PARAM_COLUMNS)
_STOPS, _NO_TOKEN = tl.constexpr(MAX_STOP_IDS), tl.constexpr(NO_TOKEN)
_STEP, _SLOT, _COLUMNS = tl.constexpr(PACKET_STEP), tl.constexpr(PACKET_SLOT), tl.constexpr(OUTBOX_COLUMNS)
_LIVE, _STOP, _END = tl.constexpr(int(Flag.LIVE)), tl.constexpr(int(Flag.STOP)), tl.constexpr(int(Flag.LENGTH))
_MAX_STEP = tl.constexpr(MAX_STEP_WORD)
_ERROR, _INERT = tl.constexpr(int(Flag.ERROR)), tl.constexpr(int(Flag.INERT))

STOPS_AT_ONCE = 8
"""Stop ids of a row that a program compares together."""


@triton.jit
def _stops(param, token, sampled, GROUP: tl.constexpr):
    """Whether a row's token is one of its stop ids."""
    found = tl.zeros_like(sampled)
    for start in tl.static_range(0, _STOPS, GROUP):
        ids = param[:, None] + _STOP_IDS + start + tl.arange(0, GROUP)[None, :]
        equal = tl.load(ids, mask=sampled[:, None], other=_NO_TOKEN) == token[:, None]
        found |= tl.max(equal.to(tl.int32), axis=1) != 0
    return found


@triton.jit(do_not_specialize=["count", "samples", "slots", "slot_lines"])
def _finish(
    words, rows, sizes, tokens, finite, state, settings, history, lines, out, count, samples, slots, slot_lines,
    HISTORY: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program for the whole batch, so that the header can follow the lines."""
    number, slot = tl.load(words + _STEP), tl.load(words + _SLOT)
    outbox = lines + slot.to(tl.int64) * slot_lines * _COLUMNS
    column = tl.arange(0, _COLUMNS)[None, :]
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside, sampled = index < count, index < samples
        row = tl.load(rows + index, mask=inside, other=0)
        line, param = state + row * _STATE, settings + row * _PARAMS
        active = inside & (tl.load(line + _ACTIVE, mask=inside, other=0) != 0)
        computed = tl.load(line + _COMPUTED, mask=inside, other=0)
        length = tl.load(line + _LENGTH, mask=inside, other=0)
        generation = tl.load(line + _GENERATION, mask=inside, other=0)
        token = tl.load(tokens + index, mask=sampled, other=_NO_TOKEN).to(tl.int32)
        good = tl.load(finite + index, mask=sampled, other=0) != 0
        flag = tl.where(length + 1 >= tl.load(param + _MAX_LEN, mask=sampled, other=0), _END, _LIVE)
        flag = tl.where(_stops(param, token, sampled, GROUP), _STOP, flag)
        flag = tl.where(active, tl.where(good, flag, _ERROR), _INERT)
        written = active & good
        token = tl.where(written, token, _NO_TOKEN)

        step = tl.full([BLOCK], 1, tl.int32)
        if SIZES:
            step = tl.load(sizes + index, mask=inside, other=0).to(tl.int32)
        # An inert row stays as it is. Nobody still reads what is written now.
        tl.debug_barrier()
        tl.store(line + _COMPUTED, computed + step, mask=active)
        tl.store(history + row * HISTORY + length, token, mask=written)
        tl.store(line + _LENGTH, length + 1, mask=written)
        tl.store(line + _ACTIVE, tl.zeros_like(flag), mask=active & sampled & (flag != _LIVE))

        # A line is one store of 16 bytes: it may have to cross the bus.
        left = tl.where(column == 0, row.to(tl.int32)[:, None], generation[:, None])
        right = tl.where(column == 2, token[:, None], flag[:, None])
        place = outbox + (1 + index)[:, None] * _COLUMNS + column
        tl.store(place, tl.where(column < 2, left, right), mask=sampled[:, None])
        tl.store(out + index, token, mask=sampled)

    # The host reads behind the event of this step. Should it ever poll, the header still comes behind the lines, which
    # may lie in its memory: a barrier, a fence for the whole system (in an addition of nothing to the null row), and
    # a barrier again, since one thread carries the fence for all.
    tl.debug_barrier()
    tl.store(words + _STEP, (number + 1) & _MAX_STEP)  # every thread has read them
    tl.store(words + _SLOT, (slot + 1) % slots)
    tl.atomic_add(state + _GENERATION, 0, sem="acq_rel", scope="sys")
    tl.debug_barrier()
    tl.store(outbox + column, tl.where(column == 0, number, tl.where(column == 1, samples, 0)))


def finish(
    words: Tensor, rows: Tensor, sizes: Tensor | None, tokens: Tensor, finite: Tensor, state: Tensor, params: Tensor,
    history: Tensor, lines: Tensor,
) -> Tensor:  # fmt: skip
    """See `seam.Kernels.finish`. `lines` may be pinned host memory, which a GPU writes as its own."""
    assert words.is_contiguous() and state.is_contiguous() and params.is_contiguous() and history.is_contiguous()
    assert lines.stride(1) == 1 and lines.stride(0) % OUTBOX_COLUMNS == 0
    assert lines.shape[1] >= (1 + tokens.shape[0]) * OUTBOX_COLUMNS
    count, samples = rows.shape[0], tokens.shape[0]
    out = torch.empty(samples, dtype=torch.int32, device=words.device)
    block = lanes(count)
    _finish[(1,)](
        words, rows, rows if sizes is None else sizes, tokens, finite, state, params, history, lines, out,
        count, samples, lines.shape[0], lines.stride(0) // OUTBOX_COLUMNS, history.shape[1], sizes is not None, block,
        STOPS_AT_ONCE, num_warps=block // 32,
    )  # fmt: skip
    return out


triton_finish = operator(
    "triton_finish(Tensor(a!) words, Tensor rows, Tensor? sizes, Tensor tokens, Tensor finite, Tensor(b!) state, "
    "Tensor params, Tensor(c!) history, Tensor(d!) lines) -> Tensor",
    finish,
)
