"""The checksum of a page in Triton: one launch, whose programs add up what they find."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels import pages
from gapless.kernels.library_triton import operator

TILE = 4096
"""Words that a program takes"""
_FACTOR, _MASK = tl.constexpr(pages.FACTOR), tl.constexpr(pages.MASK)


# One variant, whichever page and place: the first transfer compiles none.
@triton.jit(do_not_specialize_on_alignment=["page", "total"])
def page_kernel(page, total, words, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    word = tl.load(page + place, mask=place < words, other=0).to(tl.int64)
    weight = ((place.to(tl.int64) * _FACTOR) & _MASK) * 2 + 1
    tl.atomic_add(total, tl.sum(word * weight, 0), sem="relaxed")


def _page_sum(page: Tensor, total: Tensor) -> None:
    words = page.shape[0]
    page_kernel[(triton.cdiv(words, TILE),)](page, total, words, TILE=TILE, num_warps=8)


page_sum = operator("triton_page_sum(Tensor page, Tensor(a!) total) -> ()", _page_sum)
