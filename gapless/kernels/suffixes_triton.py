"""Drafts from other answers in Triton. See `kernels.suffixes`."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels import layout as L
from gapless.kernels.library_triton import lanes, operator
from gapless.kernels.unpack import unpacked

_ACTIVE, _LENGTH, _DRAFTED = tl.constexpr(L.ACTIVE), tl.constexpr(L.LENGTH), tl.constexpr(L.DRAFTED)
_STATE, _PARAMS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS)
_DRAFTS, _MAX_LEN, _TENANT = tl.constexpr(L.DRAFTS), tl.constexpr(L.MAX_LEN), tl.constexpr(L.TENANT)
_OWN_TENANT, _DIGEST, _NEXT = tl.constexpr(L.OWN_TENANT), tl.constexpr(L.DIGEST), tl.constexpr(L.NEXT)
_SEEN, _SAME, _CLAIM = tl.constexpr(L.SEEN), tl.constexpr(L.SAME), tl.constexpr(L.CLAIM)
_WORDS, _SEEN_MOST = tl.constexpr(L.SUFFIX_WORDS), tl.constexpr(L.SEEN_MOST)
_BEGIN, _MIX, _SHIFT = tl.constexpr(L.DIGEST_BEGIN), tl.constexpr(L.DIGEST_MIX), tl.constexpr(L.DIGEST_SHIFT)
_SHORTEST = tl.constexpr(L.SUFFIX_LENGTHS[0])
"""Each further length is twice the previous one."""


@triton.jit
def _begin(tenant):
    return tenant.to(tl.uint32, bitcast=True) * _BEGIN


@triton.jit
def _mix(digest, token):
    digest = (digest ^ token.to(tl.uint32, bitcast=True)) * _MIX
    return digest ^ (digest >> _SHIFT)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "tokens"])
def remember_kernel(
    rows, tokens, state, settings, history, suffixes, count,
    HISTORY: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Record the token that followed in these rows, for the context length of the program's part of the table."""
    size = _SHORTEST << tl.program_id(0)
    part = suffixes + tl.program_id(0).to(tl.int64) * (ENTRIES + 1) * _WORDS
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        row = tl.load(rows + index, mask=index < count, other=0).to(tl.int64)
        tenant = tl.load(settings + row * _PARAMS + _TENANT, mask=index < count, other=0)
        end = tl.load(state + row * _STATE + _LENGTH, mask=index < count, other=0)
        for place in tl.static_range(WIDTH):
            end -= (tl.load(tokens + index * WIDTH + place, mask=index < count, other=-1) >= 0).to(tl.int32)
        for place in range(WIDTH):
            token = tl.load(tokens + index * WIDTH + place, mask=index < count, other=-1)
            may = (token >= 0) & (tenant > 0) & (end >= size)
            digest, taken = _begin(tenant), tl.where(may, size, 0)
            for back in tl.static_range(1, LONGEST + 1):
                before = tl.load(history + row * HISTORY + end - back, mask=back <= taken, other=0)
                digest = tl.where(back <= taken, _mix(digest, before), digest)
            entry = part + (digest % ENTRIES).to(tl.int64) * _WORDS
            tl.atomic_max(entry + _CLAIM, index + 1, mask=may)
            tl.debug_barrier()
            mine = may & (tl.atomic_or(entry + _CLAIM, 0, mask=may) == index + 1)
            tl.debug_barrier()  # before any claim is released
            known = tl.load(entry + _OWN_TENANT, mask=mine, other=0) == tenant
            known &= tl.load(entry + _DIGEST, mask=mine, other=0) == digest.to(tl.int32, bitcast=True)
            following = tl.load(entry + _NEXT, mask=mine, other=0)
            agrees = known & (following == token)
            seen = tl.load(entry + _SEEN, mask=mine, other=0) + 1
            same = tl.load(entry + _SAME, mask=mine, other=0) + agrees.to(tl.int32)
            lost = (known == 0) | ((agrees == 0) & (2 * same < seen))
            seen, same = tl.where(lost, 1, seen), tl.where(lost, 1, same)
            halved = (seen >= _SEEN_MOST).to(tl.int32)
            tl.store(entry + _OWN_TENANT, tenant, mask=mine)
            tl.store(entry + _DIGEST, digest.to(tl.int32, bitcast=True), mask=mine)
            tl.store(entry + _NEXT, tl.where(lost, token, following), mask=mine)
            tl.store(entry + _SEEN, seen >> halved, mask=mine)
            tl.store(entry + _SAME, same >> halved, mask=mine)
            tl.atomic_xchg(entry + _CLAIM, 0, mask=mine)
            tl.debug_barrier()
            end += (token >= 0).to(tl.int32)


@triton.jit(do_not_specialize=["factor", "least"], do_not_specialize_on_alignment=["rows"])
def recall_kernel(
    rows, matches, state, settings, history, suffixes, factor, least,
    HISTORY: tl.constexpr, MOST: tl.constexpr, ENTRIES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Draft for one row, token by token, from its tenant's answers."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    line, param = state + row * _STATE, settings + row * _PARAMS
    length, tenant = tl.load(line + _LENGTH), tl.load(param + _TENANT)
    most = tl.minimum(tl.load(param + _DRAFTS), tl.load(param + _MAX_LEN) - 1 - length)
    most = tl.minimum(tl.where(tl.load(line + _ACTIVE) != 0, most, 0), MOST)
    if most > 0:
        own = tl.load(matches + tl.program_id(0))
        match, bound, drafts = own, most, 0
        for place in range(MOST):
            end = history + row * HISTORY + length + place
            found, token, digest = 0, 0, _begin(tenant)
            for part in tl.static_range(PARTS):
                for back in tl.static_range((_SHORTEST << part) // 2 if part else 0, _SHORTEST << part):
                    before = tl.load(end - back - 1, mask=back < length + place, other=0)
                    digest = _mix(digest, before)
                entry = suffixes + (part * (ENTRIES + 1) + (digest % ENTRIES).to(tl.int64)) * _WORDS
                known = (tl.load(entry + _OWN_TENANT) == tenant) & (tenant > 0)
                known &= tl.load(entry + _DIGEST) == digest.to(tl.int32, bitcast=True)
                known &= 1000 * tl.load(entry + _SAME) >= least * tl.load(entry + _SEEN)
                known &= length + place >= (_SHORTEST << part)
                found = tl.where(known, _SHORTEST << part, found)
                token = tl.where(known, tl.load(entry + _NEXT), token)
            if place == 0:
                bound = tl.where(found > own, bound, 0)
                match = found
            going = (found > 0) & (drafts == place) & (place < tl.minimum(bound, factor * match // 1000))
            tl.store(end, token, mask=going)
            tl.debug_barrier()  # the next turn reads it
            drafts += going.to(tl.int32)
        kept = tl.minimum(tl.load(line + _DRAFTED), length + factor * own // 1000)
        tl.store(line + _DRAFTED, tl.where(drafts > 0, length + drafts, kept))


def _remember(rows: Tensor, tokens: Tensor, state: Tensor, params: Tensor, history: Tensor, suffixes: Tensor) -> None:
    assert tokens.is_contiguous() and suffixes.is_contiguous() and history.is_contiguous()
    (count, width), (parts, entries, _) = tokens.shape, suffixes.shape
    if count:
        remember_kernel[(parts,)](
            rows, tokens, state, params, history, suffixes, count, history.shape[1], width, entries - 1,
            L.SUFFIX_LENGTHS[parts - 1], min(256, lanes(count)), num_warps=4,
        )  # fmt: skip


def _recall(
    rows: Tensor, same: Tensor, state: Tensor, params: Tensor, history: Tensor, suffixes: Tensor, most: int,
    factor: int, least: int,
) -> None:  # fmt: skip
    parts, entries, _ = suffixes.shape
    if rows.shape[0]:
        recall_kernel[(rows.shape[0],)](
            rows, same, state, params, history, suffixes, factor, least, history.shape[1], most, entries - 1, parts,
            num_warps=1,
        )  # fmt: skip


remember = unpacked(operator(_remember, "suffixes"))
recall = unpacked(operator(_recall, "state", "history"))
