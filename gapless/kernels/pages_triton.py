"""Copies of pages and their checksums in Triton: one launch for all pages of a group in a transfer.

The multiprocessors read and write pinned host memory themselves. So a transfer never blocks a step's upload on a copy
engine, and its launch costs the host the same for any number of pages.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gapless.device import facts
from gapless.kernels import pages
from gapless.kernels.library_triton import operator

COPY_TILE = 4096
"""Words copied by a program at a time"""
LOADING, STORING = 8, 2
"""Programs of one launch. Their writes to the host queue up at the bus, before the writes of steps: on an H100, 16
storing programs double the time of a step. These numbers leave a step's longest time unchanged, and reach 46 and 43
GB/s alone."""
_FACTOR, _MASK = tl.constexpr(pages.FACTOR), tl.constexpr(pages.MASK)


# One variant for any number of pages and any start of a group's places: no later transfer compiles.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["places", "sums"])
def copy_kernel(src, dst, places, sums, count, words, src_stride, dst_stride, TILE: tl.constexpr):
    for page in range(count):
        source = src + tl.load(places + page).to(tl.int64) * src_stride
        target = dst + tl.load(places + count + page).to(tl.int64) * dst_stride
        total = tl.zeros([TILE], tl.int64)
        for first in range(tl.program_id(0) * TILE, words, tl.num_programs(0) * TILE):
            place = first + tl.arange(0, TILE)
            word = tl.load(source + place, mask=place < words, other=0)
            tl.store(target + place, word, mask=place < words)
            total += word.to(tl.int64) * (((place.to(tl.int64) * _FACTOR) & _MASK) * 2 + 1)
        tl.atomic_add(sums + page, tl.sum(total, 0), sem="relaxed")


def copy_pages(src: Tensor, dst: Tensor, places: Tensor, sums: Tensor) -> None:
    programs = STORING if facts.on_host(dst) else LOADING
    copy_kernel[(programs,)](
        src, dst, places, sums, sums.shape[0], src.shape[1], src.stride(0), dst.stride(0), COPY_TILE, num_warps=8
    )


triton_copy_pages = operator(copy_pages, "dst", "sums")
