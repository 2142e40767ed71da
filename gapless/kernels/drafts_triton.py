"""Drafts in Triton: acceptance, and drafts for the next step."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.base.records import NO_TOKEN, REJECTED, RIGHT
from gapless.kernels import layout as L
from gapless.kernels.library_triton import lanes, operator
from gapless.kernels.unpack import unpacked

MATCH_BLOCK = 1024
"""Tokens of a history read by a program at once."""

_ACTIVE, _LENGTH, _DRAFTED = tl.constexpr(L.ACTIVE), tl.constexpr(L.LENGTH), tl.constexpr(L.DRAFTED)
_STATE, _PARAMS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS)
_DRAFTS, _MAX_LEN = tl.constexpr(L.DRAFTS), tl.constexpr(L.MAX_LEN)
_NO_TOKEN, _REJECTED, _RIGHT = tl.constexpr(NO_TOKEN), tl.constexpr(REJECTED), tl.constexpr(RIGHT)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows"])
def accept_kernel(
    tokens, finite, rows, state, history, out, count,
    HISTORY: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the tokens sampled after right drafts."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    length = tl.load(state + row * _STATE + _LENGTH, mask=inside, other=0)
    drafted = tl.load(state + row * _STATE + _DRAFTED, mask=inside, other=0) - length
    going = inside
    first = tl.load(tokens + index, mask=inside, other=0)
    for place in tl.static_range(WIDTH):
        given = tl.full([BLOCK], _NO_TOKEN, tl.int64)
        if (PLACES == 1) & (place == 1):
            draft = tl.load(history + row * HISTORY + length, mask=inside & (drafted > 0), other=_NO_TOKEN)
            given = tl.where(drafted > 0, tl.where(draft == first, _RIGHT, _REJECTED), _NO_TOKEN).to(tl.int64)
        if place < PLACES:
            token = tl.load(tokens + place * count + index, mask=inside, other=0)
            going &= (place == 0) | (tl.load(finite + place * count + index, mask=inside, other=0) != 0)
            missed = tl.where((place > 0) & (place <= drafted), _REJECTED, _NO_TOKEN)
            given = tl.where(going, token, missed)
            more = inside & (place < drafted)
            draft = tl.load(history + row * HISTORY + length + place, mask=more, other=_NO_TOKEN)
            going &= more & (draft == token)
        tl.store(out + index * WIDTH + place, given, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def look_up_kernel(
    rows, state, settings, history, matches,
    HISTORY: tl.constexpr, MOST: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draft for one row the tokens that followed the last occurrence of the longest matching end of its history."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    line, param, own = state + row * _STATE, settings + row * _PARAMS, history + row * HISTORY
    length = tl.load(line + _LENGTH)
    most = tl.minimum(tl.load(param + _DRAFTS), tl.load(param + _MAX_LEN) - 1 - length)
    most = tl.minimum(tl.where(tl.load(line + _ACTIVE) != 0, most, 0), MOST)
    match = 0
    if most > 0:
        best = tl.zeros([BLOCK], tl.int64)
        for start in range(1, length, BLOCK):
            end = start + tl.arange(0, BLOCK)
            same, going = tl.zeros([BLOCK], tl.int32), end < length
            for back in tl.static_range(1, LONGEST + 1):
                going &= end >= back
                token = tl.load(own + end - back, mask=going, other=_NO_TOKEN)
                going &= token == tl.load(own + tl.maximum(length - back, 0))
                same += going.to(tl.int32)
            found = same.to(tl.int64) * HISTORY + end
            best = tl.maximum(best, tl.where(same >= SHORTEST, found, 0))
        longest = tl.max(best, axis=0)
        start, match = (longest % HISTORY).to(tl.int32), (longest // HISTORY).to(tl.int32)
        drafts = tl.where(start > 0, most, 0)
        for index in tl.static_range(MOST):
            draft = tl.load(own + start + index % tl.maximum(length - start, 1))
            tl.store(own + length + index, draft, mask=index < drafts)
        tl.store(line + _DRAFTED, length + drafts)
    tl.store(matches + tl.program_id(0), match)


def _accept(tokens: Tensor, finite: Tensor, rows: Tensor, state: Tensor, history: Tensor, width: int) -> Tensor:
    assert tokens.is_contiguous() and finite.is_contiguous() and history.is_contiguous()
    count = rows.shape[0]
    out = torch.empty(count, width, dtype=torch.int64, device=tokens.device)
    if count:
        block, places = min(256, lanes(count)), tokens.shape[0] // count
        accept_kernel[(triton.cdiv(count, block),)](
            tokens, finite, rows, state, history, out, count, history.shape[1], places, width, block, num_warps=2
        )
    return out


def _look_up(
    rows: Tensor, state: Tensor, params: Tensor, history: Tensor, most: int, shortest: int, longest: int
) -> Tensor:
    matches = torch.empty_like(rows)
    if rows.shape[0]:
        look_up_kernel[(rows.shape[0],)](
            rows, state, params, history, matches, history.shape[1], most, shortest, longest, MATCH_BLOCK, num_warps=4
        )
    return matches


accept = unpacked(operator(_accept))
look_up = unpacked(operator(_look_up, "state", "history"))
