"""The beginning of a step of decode rows in Triton: page table changes and the gather of the batch, in one launch."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels import layout as L
from gapless.kernels.library_triton import lanes, operator
from gapless.kernels.seam import DecodeBatch
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts

_ACTIVE, _COMPUTED, _STATE = tl.constexpr(L.ACTIVE), tl.constexpr(L.COMPUTED), tl.constexpr(L.STATE_COLUMNS)
_LENGTH, _DRAFTED = tl.constexpr(L.LENGTH), tl.constexpr(L.DRAFTED)
_HEADER, _PAGE_WORDS = tl.constexpr(L.HEADER_WORDS), tl.constexpr(L.PAGE_WORDS)


@triton.jit(do_not_specialize=["count", "writes"])
def begin_decode_kernel(
    words, count, writes, state, history, pages, out,
    MAX_LEN: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Begin a step of PLACES tokens a row in one program: after a barrier it reads the page table just written."""
    lane = tl.arange(0, BLOCK)
    pairs = words + _HEADER + count
    for start in range(0, writes, BLOCK):
        pair = pairs + (start + lane) * _PAGE_WORDS
        inside = start + lane < writes
        tl.store(pages + tl.load(pair, mask=inside, other=0), tl.load(pair + 1, mask=inside, other=0), mask=inside)
    tl.debug_barrier()
    total = count * PLACES
    for start in range(0, total, BLOCK):
        index = start + lane
        inside = index < total
        row = tl.load(words + _HEADER + index % count, mask=inside, other=0).to(tl.int64)
        line = state + row * _STATE
        active = inside & (tl.load(line + _ACTIVE, mask=inside, other=0) != 0)
        position = tl.load(line + _COMPUTED, mask=inside, other=0)
        if PLACES > 1:
            drafted = tl.load(line + _DRAFTED, mask=inside, other=0) - tl.load(line + _LENGTH, mask=inside, other=0)
            active &= (index // count == 0) | (index // count <= drafted)
            position += index // count
        # An inert row's position is undefined; it reads no table.
        token = tl.load(history + row * MAX_LEN + position, mask=active, other=0)
        page = tl.load(pages + row * MAX_PAGES + position // PAGE, mask=active, other=0).to(tl.int64)
        slot = tl.where(active, page * PAGE + position % PAGE, 0)
        tl.store(out + index, row, mask=inside)
        tl.store(out + total + index, token.to(tl.int64), mask=inside)
        tl.store(out + 2 * total + index, position.to(tl.int64), mask=inside)
        tl.store(out + 3 * total + index, slot, mask=inside)
        tl.store(out + 4 * total + index, tl.where(active, position + 1, 1).to(tl.int64), mask=inside)


def _begin_decode(
    words: Tensor, count: int, places: int, writes: int, state: Tensor, history: Tensor, pages: Tensor, page_size: int
) -> Tensor:
    assert words.is_contiguous() and state.is_contiguous() and history.is_contiguous() and pages.is_contiguous()
    out = torch.empty(5, count * places, dtype=torch.int64, device=words.device)
    block = lanes(count * places)
    begin_decode_kernel[(1,)](
        words, count, writes, state, history, pages, out, history.shape[1], pages.shape[1], page_size, block,
        places, num_warps=block // 64,
    )  # fmt: skip
    return out


triton_begin_decode = operator(_begin_decode, "pages")


def begin_decode(words: Tensor, counts: Counts, tables: Tables, page_size: int) -> DecodeBatch:
    """See `seam.Kernels.begin_decode`."""
    state, _, history, pages, _ = tables
    rows, writes, places = counts.rows, counts.page_writes, counts.places
    columns = triton_begin_decode(words, rows, places, writes, state, history, pages, page_size)
    return DecodeBatch(*columns.unbind())
