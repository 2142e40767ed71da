"""Greedy and Gumbel-max sampling in Triton: the vocabulary is spread over programs, and a last program a row chooses.

A token is a function of the row's logits, settings, seed and length, whatever the batch and the spread: comparing is
exact in any order, and of equal scores the lowest id wins.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels import layout as L
from gapless.kernels.cut_triton import load_allowed
from gapless.kernels.library_triton import operator
from gapless.kernels.unpack import unpacked

SAMPLING_BLOCK = 1024
"""Tokens read by a program at once."""
CHUNKS = ((8, 1), (64, 4))
"""(rows, blocks a program): few rows need many programs each to fill a GPU, many rows do not."""
MANY_ROWS_BLOCKS = 16

_LENGTH, _TEMPERATURE = tl.constexpr(L.LENGTH), tl.constexpr(L.TEMPERATURE)
_ADJUST_SLOT = tl.constexpr(L.ADJUST_SLOT)
_SEED_LOW, _SEED_HIGH = tl.constexpr(L.SEED_LOW), tl.constexpr(L.SEED_HIGH)
_DRAFTED = tl.constexpr(L.DRAFTED)
_CUT_VALUE, _CUT_ID = tl.constexpr(L.CUT_VALUE), tl.constexpr(L.CUT_ID)
_STATE, _PARAMS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS)


@triton.jit
def gumbel(block, position, seed_low, seed_high):
    """Return the Gumbel noise [B, 4] of tokens 4 * block + (0..3), as defined in kernels/random.py."""
    zero = tl.zeros_like(block)
    word0, word1, word2, word3 = tl.philox_impl(block, zero + position, zero, zero, zero + seed_low, zero + seed_high)
    column = tl.arange(0, 4)[None, :]
    low = tl.where(column == 0, word0[:, None], word1[:, None])
    high = tl.where(column == 2, word2[:, None], word3[:, None])
    bits = tl.where(column < 2, low, high)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # -log1p(-uniform): the quotient corrects the rounding of 1 - uniform.
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, uniform / (1.0 - rest))
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * lost)
    return -tl.log(exponential)


@triton.jit
def _row(rows, sample, batch):
    """Return the row of a sample, and the number of its drafts before it."""
    return tl.load(rows + sample % batch).to(tl.int64), (sample // batch).to(tl.int32)


@triton.jit
def _runs(line, place):
    """Return whether a row has its own token or a draft at this place."""
    return (place == 0) | (place <= tl.load(line + _DRAFTED) - tl.load(line + _LENGTH))


@triton.jit
def _load(
    logits, adjusted, slots, sample, token, line, param, row, place, masks, VOCAB: tl.constexpr, ROOM: tl.constexpr
):
    """Load float32 logits of a row at a place, from its slot if it has one."""
    slot = tl.load(param + _ADJUST_SLOT).to(tl.int64)
    if slot == 0:
        x = load_allowed(logits + sample * VOCAB, token, line, param, row, place, masks, VOCAB, ROOM).to(tl.float32)
    else:
        own = adjusted + (place * slots + slot) * VOCAB
        x = load_allowed(own, token, line, param, row, place, masks, VOCAB, ROOM)
    return x


@triton.jit(do_not_specialize=["slots", "batch"], do_not_specialize_on_alignment=["rows"])
def best_kernel(
    logits, adjusted, slots, rows, state, settings, masks, batch, values, ids,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the best value of one chunk of a row, and its first token. NaN counts as infinite."""
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = _row(rows, sample, batch)
    line, param = state + row * _STATE, settings + row * _PARAMS
    blocks = tl.where(_runs(line, place), BLOCKS, 0)
    first = split * (BLOCKS * BLOCK) + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first
    for index in range(blocks):
        token = first + index * BLOCK
        x = _load(logits, adjusted, slots, sample, token, line, param, row, place, masks, VOCAB, ROOM)
        x = tl.where(x != x, float("inf"), x)
        best_id = tl.where(x > best, token, best_id)
        best = tl.where(x > best, x, best)
    top = tl.max(best, axis=0)
    at = sample * LANES + split
    tl.store(values + at, top)
    tl.store(ids + at, tl.min(tl.where(best == top, best_id, VOCAB), axis=0))


@triton.jit(do_not_specialize=["slots", "batch"], do_not_specialize_on_alignment=["rows"])
def drawn_kernel(
    logits, adjusted, slots, rows, state, settings, masks, batch, values, noisy, noisy_ids,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, SPLITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Return the best score, with noise, of the kept tokens in one chunk of a row, and its token."""
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = _row(rows, sample, batch)
    line, param = state + row * _STATE, settings + row * _PARAMS
    temperature = tl.load(param + _TEMPERATURE).to(tl.float32, bitcast=True)
    if (temperature > 0.0) & _runs(line, place):
        lane = tl.arange(0, LANES)
        partial = tl.load(values + sample * LANES + lane, mask=lane < SPLITS, other=float("-inf"))
        # Distances from the best: no temperature, however small, makes these overflow.
        top = tl.max(partial, axis=0)
        length = (tl.load(line + _LENGTH) + place).to(tl.uint32)
        cut = line + 2 * place
        lowest, last = tl.load(cut + _CUT_VALUE).to(tl.float32, bitcast=True), tl.load(cut + _CUT_ID)
        seed_low = tl.load(param + _SEED_LOW).to(tl.uint32, bitcast=True)
        seed_high = tl.load(param + _SEED_HIGH).to(tl.uint32, bitcast=True)
        quarter = tl.arange(0, BLOCK // 4)
        first = split * (BLOCKS * BLOCK)
        best = tl.full([BLOCK // 4, 4], float("-inf"), tl.float32)
        best_id = first + quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
        for index in range(BLOCKS):
            block = (first + index * BLOCK) // 4 + quarter
            token = block[:, None] * 4 + tl.arange(0, 4)[None, :]
            x = _load(logits, adjusted, slots, sample, token, line, param, row, place, masks, VOCAB, ROOM)
            kept = (x > lowest) | ((x == lowest) & (token <= last))
            # With top-k or top-p few chunks hold a kept token, and the noise is the cost.
            if tl.max(kept.to(tl.int32)) != 0:
                noise = gumbel(block.to(tl.uint32), length, seed_low, seed_high)
                score = tl.where(kept, tl.div_rn(x - top, temperature) + noise, float("-inf"))
                best_id = tl.where(score > best, token, best_id)
                best = tl.where(score > best, score, best)
        most = tl.max(best)
        at = sample * LANES + split
        tl.store(noisy + at, most)
        tl.store(noisy_ids + at, tl.min(tl.where(best == most, best_id, VOCAB)))


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["rows"])
def choose_kernel(
    rows, settings, batch, values, ids, noisy, noisy_ids, tokens, finite,
    VOCAB: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the token of one row, and whether its logits are good: nothing NaN or +inf, and not all -inf."""
    sample = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside, at = lane < SPLITS, sample * LANES + lane
    value = tl.load(values + at, mask=inside, other=float("-inf"))
    top = tl.max(value, axis=0)
    tl.store(finite + sample, (top > float("-inf")) & (top < float("inf")))
    token = tl.load(ids + at, mask=inside, other=VOCAB)
    row, _ = _row(rows, sample, batch)
    param = settings + row * _PARAMS
    if tl.load(param + _TEMPERATURE).to(tl.float32, bitcast=True) > 0.0:
        value = tl.load(noisy + at, mask=inside, other=float("-inf"))
        token = tl.load(noisy_ids + at, mask=inside, other=VOCAB)
    chosen = tl.min(tl.where(value == tl.max(value, axis=0), token, VOCAB), axis=0)
    # The token of a bad row is undefined, but valid.
    tl.store(tokens + sample, tl.minimum(chosen, VOCAB - 1).to(tl.int64))


def _blocks(samples: int) -> int:
    return next((blocks for rows, blocks in CHUNKS if samples <= rows), MANY_ROWS_BLOCKS)


def _sample(
    logits: Tensor, rows: Tensor, state: Tensor, params: Tensor, masks: Tensor, adjusted: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert logits.is_contiguous() and state.is_contiguous() and params.is_contiguous() and masks.is_contiguous()
    samples, vocab = logits.shape
    blocks = _blocks(samples)
    splits = triton.cdiv(vocab, blocks * SAMPLING_BLOCK)
    # A power of two keeps every part aligned alike, so that one kernel serves all shapes.
    lanes = max(4, triton.next_power_of_2(splits))
    values = torch.empty(2, samples, lanes, dtype=torch.float32, device=logits.device)
    ids = torch.empty(2, samples, lanes, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(samples, dtype=torch.int64, device=logits.device)
    finite = torch.empty(samples, dtype=torch.bool, device=logits.device)
    (best, noisy), (best_ids, noisy_ids) = values.unbind(), ids.unbind()
    if adjusted is None:  # then no row has a slot
        adjusted = best
    batch = max(1, rows.shape[0])
    given, grid = (logits, adjusted, adjusted.shape[1], rows, state, params, masks, batch, best), (samples, splits)
    room = masks.shape[1]
    best_kernel[grid](*given, best_ids, vocab, room, blocks, SAMPLING_BLOCK, lanes)
    drawn_kernel[grid](*given, noisy, noisy_ids, vocab, room, splits, blocks, SAMPLING_BLOCK, lanes)
    choose_kernel[(samples,)](
        rows, params, batch, best, best_ids, noisy, noisy_ids, tokens, finite, vocab, splits, lanes, num_warps=1
    )
    return tokens, finite


sample = unpacked(operator(_sample))
