"""The cut of a row's filters, in Triton: passes over its logits count and weigh them by digits of their keys.

Logits are compared as ordered whole numbers, keys of 16 or 32 bits. A pass sums the tokens of each digit, which settles
that digit of the key; the next pass works on the tokens with it. Counting settles 8 bits a pass and weighing 4, but the
last 8 are always counted, since tokens of equal keys have equal weights. Sums are whole numbers, added by atomics, so
they do not depend on how the vocabulary is spread over programs. First top-k, then top-p over its result. The last pass
also keeps each program's counts, and its last program to end looks up the id among tokens equal to the last one. Rows
without a filter read no logits in its passes.

On Hopper and later, with few rows, a pass begins before the previous one ends, and its logits arrive meanwhile. The
first pass begins after all earlier work of the stream, so logits and tables are ready.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.base.params import MAX_STOP_IDS
from gapless.kernels import layout as L
from gapless.kernels.library_triton import all_stored, arch, launch_options, operator
from gapless.kernels.unpack import unpacked

CUT_FEW_ROWS, FEW_ROWS_TILE, CUT_TILE = 4, 1024, 2048
"""Tokens of a program: few rows need many programs each to fill a GPU, many rows do not."""
EARLY_TO = 4
"""An early launch pays for up to this many rows."""
COUNT_REGISTERS = 80
"""Register limit of a thread of `count_kernel`: its last program alone could use more, and then fewer would run at
once."""
COUNT_BITS, WEIGH_BITS = 8, 4
SLOT = 8 + 2**COUNT_BITS
"""Words of a pass: results of the passes before, then the sums of its digits."""

_LENGTH, _MIN_LEN, _STOP_IDS = tl.constexpr(L.LENGTH), tl.constexpr(L.MIN_LEN), tl.constexpr(L.STOP_IDS)
_DRAFTED, _MASKED, _LATE = tl.constexpr(L.DRAFTED), tl.constexpr(L.MASKED), tl.constexpr(L.LATE)
_TEMPERATURE, _TOP_K = tl.constexpr(L.TEMPERATURE), tl.constexpr(L.TOP_K)
_TOP_P, _MIN_P = tl.constexpr(L.TOP_P), tl.constexpr(L.MIN_P)
_CUT_VALUE, _CUT_ID = tl.constexpr(L.CUT_VALUE), tl.constexpr(L.CUT_ID)
_KEEP_VALUE, _KEEP_ID = tl.constexpr(L.KEEP_VALUE), tl.constexpr(L.KEEP_ID)
_STATE, _PARAMS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS)
_STOPS, _UNITS, _SLOT = tl.constexpr(MAX_STOP_IDS), tl.constexpr(2.0**40), tl.constexpr(SLOT)
_COUNT_BITS, _COUNTS = tl.constexpr(COUNT_BITS), tl.constexpr(2**COUNT_BITS)
_WEIGH_BITS, _WEIGHTS = tl.constexpr(WEIGH_BITS), tl.constexpr(2**WEIGH_BITS)
# Words of a row's search: number of ended programs; then slots.
_ENDED, _SLOTS = (tl.constexpr(word) for word in (0, 8))
# Words of a slot: the digits settled before it, the wanted amount of the tokens with them, then in a first pass by
# weight top-k's amount above its last key, that key, and the number of its tokens that stay.
_PREFIX, _WANTED, _ABOVE, _LAST, _STAY, _SUMS = (tl.constexpr(word) for word in (0, 1, 2, 3, 4, 8))


@triton.jit
def load_allowed(logits, token, line, param, row, place, masks, VOCAB: tl.constexpr, ROOM: tl.constexpr):
    """Load logits of a row in their own dtype: -inf past the vocabulary, for masked tokens and, below the minimum
    length, at stop ids.

    They are the logits after `place` drafts; `masks` has ROOM places a row.
    """
    x = tl.load(logits + token, mask=token < VOCAB, other=float("-inf"))
    if (tl.load(param + _MASKED) != 0) & (tl.load(line + _LATE) == 0):
        masks += (row * ROOM + place) * ((VOCAB + 31) // 32)
        word = tl.load(masks + token // 32, mask=token < VOCAB, other=0)
        x = tl.where(((word >> (token % 32)) & 1) == 0, float("-inf"), x)
    if tl.load(line + _LENGTH) + place + 1 <= tl.load(param + _MIN_LEN):
        for stop in range(_STOPS):
            x = tl.where(token == tl.load(param + _STOP_IDS + stop), float("-inf"), x)
    return x


@triton.jit
def _listed(index, rows, state, settings, batch, EARLY: tl.constexpr):
    """Return a program's sample, its row and the row's lines of the tables, its place, and whether it is no padding."""
    if EARLY:
        cuda.gdc_launch_dependents()
    entry = tl.program_id(0)
    sample = tl.load(index + entry)
    before = tl.load(index + entry - 1, mask=entry > 0, other=-1)
    row, place = tl.load(rows + sample % batch).to(tl.int64), sample // batch
    line, param = state + row * _STATE, settings + row * _PARAMS
    runs = (place == 0) | (place <= tl.load(line + _DRAFTED) - tl.load(line + _LENGTH))
    return sample.to(tl.int64), row, line, param, place, (row != 0) & (sample != before) & runs


@triton.jit
def _load_tile(
    logits, sample, line, param, row, place, masks, asks,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Load logits of a program's tokens, all -inf unless the row `asks`. On return the passes before have ended."""
    x, token = tl.full([TILE], float("-inf"), logits.dtype.element_ty), tl.program_id(1) * TILE + tl.arange(0, TILE)
    if asks:
        x = load_allowed(logits + sample * VOCAB, token, line, param, row, place, masks, VOCAB, ROOM)
    if EARLY:
        # All programs wait, so that the end of a pass implies the end of all before it.
        cuda.gdc_wait()
    return x


@triton.jit
def _real(param, COLUMN: tl.constexpr):
    return tl.load(param + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def _words(slots):
    """Words of a row's search."""
    return _SLOTS + slots * _SLOT


@triton.jit
def _wanted(param, P: tl.constexpr, VOCAB: tl.constexpr):
    """Return whether a row that draws has this filter: top-p or top-k."""
    top_k = tl.load(param + _TOP_K)
    asks = _real(param, _TOP_P) < 1.0 if P else (top_k > 0) & (top_k < VOCAB)
    return asks & (_real(param, _TEMPERATURE) > 0.0)


@triton.jit
def _key(x):
    """Keys uint32 in the order of the logits; a zero has two signs, and they are equal."""
    if x.dtype.primitive_bitwidth == 16:
        bits = tl.where(x == 0, 0, x.to(tl.int16, bitcast=True)).to(tl.int32) & 0xFFFF
        key = tl.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000).to(tl.uint32)
    else:
        bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))
        key = tl.where(bits < 0, ~bits, bits ^ -0x80000000).to(tl.uint32, bitcast=True)
    return key


@triton.jit
def _value(key, logits):
    """float32 of a key."""
    if logits.dtype.element_ty.primitive_bitwidth == 16:
        bits = tl.where(key >= 0x8000, key ^ 0x8000, key ^ 0xFFFF).to(tl.uint16)
        x = bits.to(logits.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        bits = key.to(tl.int32, bitcast=True)
        x = tl.where(bits < 0, bits ^ -0x80000000, ~bits).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _weight(x, top, temperature):
    return tl.exp(tl.div_rn(x - top, temperature))


@triton.jit
def _units(x, top, temperature):
    """Weights as whole numbers, int64, 2**40 for the best."""
    return (_weight(x, top, temperature) * _UNITS).to(tl.int64)


@triton.jit
def _top_key(tops, LANES: tl.constexpr):
    """Return the key of a row's best token among its programs' results."""
    lane, splits = tl.arange(0, LANES), tl.num_programs(1)
    each = tl.load(tops + tl.program_id(0) * splits + lane, mask=lane < splits, other=0)
    return tl.max(each, axis=0).to(tl.uint32)


@triton.jit
def _read(words):
    """Read words of a search, past the first-level cache: other programs, also of this launch, wrote them."""
    return tl.load(words, cache_modifier=".cg")


@triton.jit
def _reached(amount, wanted, DIGITS: tl.constexpr):
    """Return the digit where the sum from the largest on reaches `wanted`, and the wanted part of that digit."""
    digit, sums = tl.arange(0, DIGITS), tl.cumsum(amount, axis=0, reverse=True)
    found = tl.maximum(tl.sum((sums >= wanted).to(tl.int32), axis=0) - 1, 0)
    return found.to(tl.uint32), wanted - tl.sum(tl.where(digit == found, sums - amount, 0), axis=0)


@triton.jit
def _counted(slot):
    """Return the key as far as a pass by counts settles it, and the wanted number of tokens with it."""
    digit, wanted = _reached(_read(slot + _SUMS + tl.arange(0, _COUNTS)), _read(slot + _WANTED), _COUNTS)
    return (_read(slot + _PREFIX).to(tl.uint32) << _COUNT_BITS) + digit, wanted


@triton.jit
def _weighed(slot, first, logits, param, top, temperature):
    """Return the key as far as a pass by weight settles it, and the wanted weight of the tokens with it."""
    wanted = _read(slot + _WANTED)
    if first:
        last = _value(_read(slot + _LAST).to(tl.uint32), logits)
        total = _read(slot + _ABOVE) + _read(slot + _STAY) * _units(last, top, temperature)
        exact = _real(param, _TOP_P).to(tl.float64) * total.to(tl.float64)
        mass = exact.to(tl.int64)
        mass += (mass.to(tl.float64) < exact).to(tl.int64)
        wanted = tl.minimum(tl.maximum(mass, 1), total)
    digit, wanted = _reached(_read(slot + _SUMS + tl.arange(0, _WEIGHTS)), wanted, _WEIGHTS)
    return (_read(slot + _PREFIX).to(tl.uint32) << _WEIGH_BITS) + digit, wanted


@triton.jit
def _after_top_k(own, param, counts, VOCAB: tl.constexpr):
    """Return the last key left by top-k after its `counts` passes, and the number of its tokens that stay; 0 without
    passes."""
    key, stay = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int64)
    if _wanted(param, False, VOCAB) & (counts > 0):
        key, stay = _counted(own + _SLOTS + (counts - 1) * _SLOT)
    return key, stay


@triton.jit
def _after_top_p(slot, top_key, logits, top, temperature):
    """Return the key and number found by top-p's last pass, which counts tokens of whole keys."""
    prefix, wanted = _read(slot + _PREFIX).to(tl.uint32) << _COUNT_BITS, _read(slot + _WANTED)
    digit = tl.arange(0, _COUNTS)
    # No token has a key above the best one's.
    value = _value(tl.minimum(prefix + digit.to(tl.uint32), top_key), logits)
    found, wanted = _reached(_read(slot + _SUMS + digit) * _units(value, top, temperature), wanted, _COUNTS)
    key = prefix + found
    each = tl.maximum(_units(_value(key, logits), top, temperature), 1)
    return key, (wanted + each - 1) // each


@triton.jit
def _add_counts(sums, key, start, shift):
    """Count the keys with prefix `start` by their next digit, add the counts to `sums`, and return them."""
    digit, counts = (key >> shift) - start, tl.arange(0, _COUNTS)
    count = tl.histogram(digit.to(tl.int32), _COUNTS, mask=digit < _COUNTS)
    tl.atomic_add(sums + counts, count.to(tl.int64), mask=count != 0, sem="relaxed")
    return count


@triton.jit
def _sum_by_digit(digit, units, TILE: tl.constexpr, OWN: tl.constexpr):
    """Return the units of each digit. Threads add up the `OWN` tokens that they load, then one reduction crosses
    them."""
    digit, units = digit.reshape(TILE // OWN, OWN), units.reshape(TILE // OWN, OWN)
    sums = tl.zeros([TILE // OWN, _WEIGHTS], tl.int64)
    for each in tl.static_range(_WEIGHTS):
        own = tl.sum(tl.where(digit == each, units, 0), axis=1)
        sums = tl.where(tl.arange(0, _WEIGHTS)[None, :] == each, own[:, None], sums)
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["batch", "slots", "top_k"])
def begin_kernel(logits, index, rows, state, settings, masks, batch, search, tops, slots, top_k,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, CLEARED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The key of the best token of each program; and top-k's first pass, or else zeros for the passes after it."""
    sample, row, line, param, place, used = _listed(index, rows, state, settings, batch, EARLY)
    own, first = search + tl.program_id(0) * _words(slots), tl.program_id(1) == 0
    if first & (top_k == 0):
        word = tl.arange(0, CLEARED)
        tl.store(own + word, tl.zeros([CLEARED], tl.int64), mask=word < _words(slots))
    key = _key(_load_tile(logits, sample, line, param, row, place, masks, used, VOCAB, ROOM, TILE, False))
    tl.store(tops + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(key, axis=0).to(tl.int64))
    if used & _wanted(param, False, VOCAB) & (top_k != 0):
        _add_counts(own + _SLOTS + _SUMS, key, 0, BITS - _COUNT_BITS)
        if first:
            tl.store(own + _SLOTS + _WANTED, tl.load(param + _TOP_K).to(tl.int64))


@triton.jit(do_not_specialize=["batch", "slots", "counts", "level", "shift"])
def weigh_kernel(logits, index, rows, state, settings, masks, batch, search, tops, slots, counts, level, shift,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One pass of top-p by weight, after the `counts` of top-k."""
    sample, row, line, param, place, used = _listed(index, rows, state, settings, batch, EARLY)
    asks, own = used & _wanted(param, True, VOCAB), search + tl.program_id(0) * _words(slots)
    x = _load_tile(logits, sample, line, param, row, place, masks, asks, VOCAB, ROOM, TILE, EARLY)
    if asks:
        slot, temperature = own + _SLOTS + level * _SLOT, _real(param, _TEMPERATURE)
        top = _value(_top_key(tops, LANES), logits)
        key, units = _key(x), _units(x.to(tl.float32), top, temperature)
        if level == counts:
            last, stay = _after_top_k(own, param, counts, VOCAB)
            digit = key >> shift
            above = tl.sum(tl.where((stay == 0) | (key > last), units, 0), axis=0)
            tl.atomic_add(slot + _ABOVE, above, sem="relaxed")
            if tl.program_id(1) == 0:
                tl.store(slot + _LAST, last.to(tl.int64))
                tl.store(slot + _STAY, stay)
        else:
            prefix, wanted = _weighed(slot - _SLOT, level == counts + 1, logits, param, top, temperature)
            digit = (key >> shift) - (prefix << _WEIGH_BITS)
            if tl.program_id(1) == 0:
                tl.store(slot + _PREFIX, prefix.to(tl.int64))
                tl.store(slot + _WANTED, wanted)
        digits, sums = tl.arange(0, _WEIGHTS), _sum_by_digit(digit, units, TILE, 128 // x.dtype.primitive_bitwidth)
        tl.atomic_add(slot + _SUMS + digits, sums, mask=sums != 0, sem="relaxed")


@triton.jit
def _likely(logits, top_key, top, temperature, min_p, BITS: tl.constexpr):
    """The largest key of a logit less likely than this share of the best."""
    low, bit = tl.zeros_like(top_key), tl.full([], 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        less = _weight(_value(low + bit, logits), top, temperature) < min_p
        low = tl.where((low + bit < top_key) & less, low + bit, low)
        bit = bit // 2
    return low


@triton.jit
def _nth(
    logits, line, param, row, place, masks, parts, key, rank,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the id of a row's token of this rank, from 1, among the tokens of a key, whose last digit `parts`
    counts."""
    lane, splits = tl.arange(0, LANES), tl.num_programs(1)
    own = parts + (tl.program_id(0) * splits + lane) * _COUNTS + (key % _COUNTS).to(tl.int32)
    count = tl.load(own, mask=lane < splits, other=0, cache_modifier=".cg").to(tl.int32)
    split = tl.sum((tl.cumsum(count, axis=0) < rank).to(tl.int32), axis=0)
    seen = tl.sum(tl.where(lane < split, count, 0), axis=0)
    token = split * TILE + tl.arange(0, TILE)
    same = (_key(load_allowed(logits, token, line, param, row, place, masks, VOCAB, ROOM)) == key).to(tl.int32)
    return tl.min(tl.where((same != 0) & (tl.cumsum(same, axis=0) + seen == rank), token, _KEEP_ID), axis=0)


@triton.jit
def _settle(logits, line, param, row, place, masks, own, tops, parts, counts, slots, top_p,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the value and id of the last token that stays to the table."""
    temperature, top_key = _real(param, _TEMPERATURE), _top_key(tops, LANES)
    top = _value(top_key, logits)
    bits, last = tl.full([], _KEEP_VALUE, tl.int32), tl.full([], _KEEP_ID, tl.int32)
    if (temperature > 0.0) & (top > float("-inf")) & (top < float("inf")):
        key, left = _after_top_k(own, param, counts, VOCAB)
        if _wanted(param, True, VOCAB) & top_p:
            key, left = _after_top_p(own + _SLOTS + (slots - 1) * _SLOT, top_key, logits, top, temperature)
        min_p = _real(param, _MIN_P)
        if min_p > 0.0:
            low = _likely(logits, top_key, top, temperature, min_p, BITS)
            left = tl.where((left > 0) & (key > low), left, _KEEP_ID)
            key = tl.maximum(key, low + 1)
        value = _value(key, logits)
        # A row without filters has none left; a search that reached -inf reached everything.
        if (left > 0) & (value > float("-inf")):
            bits = value.to(tl.int32, bitcast=True)
            if left < _KEEP_ID:
                last = _nth(logits, line, param, row, place, masks, parts, key, left, VOCAB, ROOM, TILE, LANES)
    tl.store(line + 2 * place + _CUT_VALUE, bits)
    tl.store(line + 2 * place + _CUT_ID, last)


@triton.jit(do_not_specialize=["batch", "slots", "counts", "level", "shift"])
def count_kernel(logits, index, rows, state, settings, masks, batch, search, tops, parts, slots, counts, level, shift,
    VOCAB: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One pass by counts: of top-k but the first, or the last one of top-p. The last of all `slots` settles rows."""
    sample, row, line, param, place, used = _listed(index, rows, state, settings, batch, EARLY)
    top_p, own = level >= counts, search + tl.program_id(0) * _words(slots)
    asks = used & (level >= 0)
    if top_p:
        asks &= _wanted(param, True, VOCAB)
    else:
        asks &= _wanted(param, False, VOCAB)
    x = _load_tile(logits, sample, line, param, row, place, masks, asks, VOCAB, ROOM, TILE, EARLY)
    if asks:
        slot = own + _SLOTS + level * _SLOT
        if top_p:
            prefix, wanted = _weighed(slot - _SLOT, False, logits, param, 0.0, 0.0)
        else:
            prefix, wanted = _counted(slot - _SLOT)
        if tl.program_id(1) == 0:
            tl.store(slot + _PREFIX, prefix.to(tl.int64))
            tl.store(slot + _WANTED, wanted)
        count = _add_counts(slot + _SUMS, _key(x), prefix << _COUNT_BITS, shift)
        part = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(parts + part * _COUNTS + tl.arange(0, _COUNTS), count.to(tl.int16))
    if level == slots - 1:
        # All threads have added and stored before one of them signals it.
        all_stored()
        if used & (tl.atomic_add(own + _ENDED, 1, sem="acq_rel") == tl.num_programs(1) - 1):
            logits += sample * VOCAB
            again = tl.load(index + tl.program_id(0))  # reloaded: keeping its derived values would spill
            row = tl.load(rows + again % batch).to(tl.int64)
            _settle(
                logits, line, param, row, again // batch, masks, own, tops, parts, counts, slots, top_p,
                VOCAB, ROOM, TILE, BITS, LANES,
            )  # fmt: skip


def _cut(
    logits: Tensor, index: Tensor, rows: Tensor, state: Tensor, params: Tensor, masks: Tensor, top_k: bool, top_p: bool
) -> None:
    """Launch 2 kernels for 16-bit logits, 4 with top-p, 5 with both; top-k begins with a memset."""
    assert logits.is_contiguous() and state.is_contiguous() and params.is_contiguous() and masks.is_contiguous()
    entries, vocab = index.shape[0], logits.shape[1]
    tile = FEW_ROWS_TILE if entries <= CUT_FEW_ROWS else CUT_TILE
    splits, bits = triton.cdiv(vocab, tile), 8 * logits.element_size()
    lanes = max(4, triton.next_power_of_2(splits))
    counts = bits // COUNT_BITS if top_k else 0
    weights = (bits - COUNT_BITS) // WEIGH_BITS if top_p else 0
    slots = counts + weights + top_p
    # If the first launch only adds nothing, it writes the zeros itself.
    search = (torch.zeros if top_k else torch.empty)(entries, 8 + slots * SLOT, dtype=torch.int64, device=logits.device)
    tops = torch.empty(entries, splits, dtype=torch.int64, device=logits.device)
    parts = torch.empty(entries, splits, 2**COUNT_BITS, dtype=torch.int16, device=logits.device)
    gpu = arch(logits.device)
    early = entries <= EARLY_TO and gpu.early
    given, grid = (logits, index, rows, state, params, masks, rows.shape[0], search, tops), (entries, splits)
    own = {"VOCAB": vocab, "ROOM": masks.shape[1], "TILE": tile, "EARLY": early, "num_warps": 4}
    cleared = triton.next_power_of_2(8 + ((bits - COUNT_BITS) // WEIGH_BITS + 1) * SLOT)
    begin_kernel[grid](*given, slots, int(top_k), BITS=bits, CLEARED=cleared, **own)
    own |= {"LANES": lanes, **launch_options(early)}
    passes = (*given, parts, slots, counts)
    count = functools.partial(count_kernel[grid], *passes, BITS=bits, **gpu.registers(COUNT_REGISTERS), **own)
    for level in range(1, counts):
        count(level, bits - (level + 1) * COUNT_BITS)
    for level in range(weights):
        weigh_kernel[grid](*given, slots, counts, counts + level, bits - (level + 1) * WEIGH_BITS, **own)
    if top_p or not top_k:
        count(slots - 1, 0)


cut = unpacked(operator(_cut, "state"))
