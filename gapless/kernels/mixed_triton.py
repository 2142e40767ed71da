"""The beginning of a step with prompt chunks in Triton: new rows and pages into the tables, prompt tokens into the
history, and all inputs of the forward. Two launches, one if the packet has no rows and no pages."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels import layout as L
from gapless.kernels.library_triton import operator
from gapless.kernels.seam import MixedBatch
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts

_ACTIVE, _COMPUTED = tl.constexpr(L.ACTIVE), tl.constexpr(L.COMPUTED)
_LENGTH, _DRAFTED = tl.constexpr(L.LENGTH), tl.constexpr(L.DRAFTED)
_STATE, _PARAMS = tl.constexpr(L.STATE_COLUMNS), tl.constexpr(L.PARAM_COLUMNS)
_HEADER, _PAGE_WORDS = tl.constexpr(L.HEADER_WORDS), tl.constexpr(L.PAGE_WORDS)

MIXED_BLOCK = 256
"""Tokens or page writes handled by one program."""
SPLITS = 8
"""Most programs that share the tokens of one row."""
ROWS = 1024
"""Row sizes summed by a program at once; a larger batch takes another variant of the kernel."""


@triton.jit(do_not_specialize=["count", "writes", "admissions"])
def apply_kernel(words, count, writes, admissions, state, settings, pages, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Programs 0 .. admissions - 1 bring a row each, the others a block of page writes each."""
    index = tl.program_id(0)
    pairs = words + _HEADER + 2 * count
    if index < admissions:
        line = pairs + writes * _PAGE_WORDS + index * (1 + _STATE + _PARAMS)
        row, column = tl.load(line).to(tl.int64), tl.arange(0, COLUMNS)
        value = tl.load(line + 1 + column, mask=column < _STATE + _PARAMS, other=0)
        tl.store(state + row * _STATE + column, value, mask=column < _STATE)
        own = (column >= _STATE) & (column < _STATE + _PARAMS)
        tl.store(settings + row * _PARAMS + column - _STATE, value, mask=own)
    else:
        write = (index - admissions) * BLOCK + tl.arange(0, BLOCK)
        pair, inside = pairs + write * _PAGE_WORDS, write < writes
        tl.store(pages + tl.load(pair, mask=inside, other=0), tl.load(pair + 1, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["count", "decode", "tokens", "sent", "splits"])
def gather_kernel(
    words, count, decode, tokens, sent, splits, state, history, pages, by_row, by_token,
    MAX_LEN: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Program (b, s) handles a share of the tokens of the batch's row b, and the last b the tokens of no row.

    A decode row of the packet is PLACES rows of the batch, place by place, before the rows with chunks.
    """
    index, split = tl.program_id(0), tl.program_id(1)
    lane, more, decoded = tl.arange(0, ROWS), decode * (PLACES - 1), decode * PLACES
    batch = count + more
    source = index - more
    if PLACES > 1:
        source = tl.where(index < decoded, index % tl.maximum(decode, 1), source)
    before = tl.load(words + _HEADER + count + lane, mask=lane < tl.minimum(index - more, count), other=0)
    first = tl.where(index < decoded, index, tl.sum(before, axis=0) + more)
    if index == batch:
        tl.store(by_row + 3 * (batch + 1) + index, first.to(tl.int64))
        for start in range(first + split * BLOCK, tokens, splits * BLOCK):
            token = start + tl.arange(0, BLOCK)
            nothing, inside = tl.zeros([BLOCK], tl.int64), token < tokens
            tl.store(by_token + token, nothing, mask=inside)
            tl.store(by_token + tokens + token, nothing, mask=inside)
            tl.store(by_token + 2 * tokens + token, nothing, mask=inside)
    else:
        row, size = tl.load(words + _HEADER + source).to(tl.int64), tl.load(words + _HEADER + count + source)
        line = state + row * _STATE
        active = tl.load(line + _ACTIVE) != 0
        computed = tl.load(line + _COMPUTED)
        if PLACES > 1:
            place = tl.where(index < decoded, index // tl.maximum(decode, 1), 0)
            active &= (place == 0) | (place <= tl.load(line + _DRAFTED) - tl.load(line + _LENGTH))
            computed += place
        # Tokens of decode rows come from the history, tokens of chunks from the packet.
        brought, live = tl.where(index < decoded, 0, size), tl.where(active, size, 0)
        if split == 0:
            column = by_row + index
            tl.store(column, row)
            tl.store(column + (batch + 1), tl.maximum(first + size - 1, 0).to(tl.int64))
            tl.store(column + 2 * (batch + 1), tl.where(active, computed + size, 1).to(tl.int64))
            tl.store(column + 3 * (batch + 1), first.to(tl.int64))
        for start in range(split * BLOCK, size, splits * BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < size
            position = computed + token
            known = history + row * MAX_LEN + position
            prompt = tl.load(words + sent + (first - decoded) + token, mask=token < brought, other=0)
            tl.store(known, prompt, mask=token < brought)
            own = tl.load(known, mask=token < live - brought, other=0)
            page = tl.load(pages + row * MAX_PAGES + position // PAGE, mask=token < live, other=0).to(tl.int64)
            slot = tl.where(active, page * PAGE + position % PAGE, 0)
            at = by_token + first + token
            tl.store(at, (own + prompt).to(tl.int64), mask=inside)
            tl.store(at + tokens, position.to(tl.int64), mask=inside)
            tl.store(at + 2 * tokens, slot, mask=inside)


def _begin_mixed(
    words: Tensor, count: int, decode: int, writes: int, admissions: int, tokens: int, places: int, state: Tensor,
    params: Tensor, history: Tensor, pages: Tensor, page_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert words.is_contiguous() and state.is_contiguous() and params.is_contiguous()
    assert history.is_contiguous() and pages.is_contiguous()
    columns = L.STATE_COLUMNS + L.PARAM_COLUMNS
    if writes or admissions:
        grid = (admissions + triton.cdiv(writes, MIXED_BLOCK),)
        apply_kernel[grid](
            words,
            count,
            writes,
            admissions,
            state,
            params,
            pages,
            MIXED_BLOCK,
            triton.next_power_of_2(columns),
            num_warps=2,
        )
    batch = count + decode * (places - 1)
    by_row = torch.empty(4, batch + 1, dtype=torch.int64, device=words.device)
    by_token = torch.empty(3, tokens, dtype=torch.int64, device=words.device)
    sent = L.HEADER_WORDS + 2 * count + L.PAGE_WORDS * writes + (1 + columns) * admissions
    splits = min(SPLITS, triton.cdiv(tokens, MIXED_BLOCK))
    gather_kernel[batch + 1, splits](
        words, count, decode, tokens, sent, splits, state, history, pages, by_row, by_token, history.shape[1],
        pages.shape[1], page_size, MIXED_BLOCK, max(ROWS, triton.next_power_of_2(count)), places, num_warps=2,
    )  # fmt: skip
    return by_row, by_token


triton_begin_mixed = operator(_begin_mixed, "state", "params", "history", "pages")


def begin_mixed(words: Tensor, counts: Counts, tables: Tables, page_size: int) -> MixedBatch:
    """See `seam.Kernels.begin_mixed`."""
    by_row, by_token = triton_begin_mixed(words, *counts, *tables[:4], page_size)
    *columns, starts = by_row.unbind()
    rows, last, kv_lens = (column[:-1] for column in columns)
    return MixedBatch(rows, last, kv_lens, starts, *by_token.unbind())
