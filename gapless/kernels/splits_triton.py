"""Cuts the rows of a decode batch into splits, and combines their results: for attention_triton.

The host gives bounds, and programs compute the size of a split from the lengths: every program of a row, and the
combining one, must get the same size.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from gapless.kernels.kinds import Reach
from gapless.kernels.library_triton import all_stored

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Kernels run on the CPU, in Triton's interpreter, whose bfloat16 arithmetic is wrong: it gets float32."""
PROGRAMS_PER_SM = 2
"""Target number of programs with work of a decode launch: fewer leave memory idle, more cost partial results."""
GRID_PER_SM = 8
"""Most programs of a decode launch, roughly, idle ones included: enough to split one long row among many."""
MOST_SPLITS = 64
"""All splits of a row are combined in one tile."""
MANY_FROM = 5
"""Least rows of a batch whose rotating decode is cut into more and smaller programs, which all run at once, combines
its splits itself, and lets the next kernel begin after its sums: earlier, that kernel would slow it down."""
MANY_PER_SM = 3
"""Target number of programs with work of such a launch."""
AT_ONCE_PER_SM = 4
"""Most programs of it that a multiprocessor runs at once."""
LEAST_IN_SPLIT = 64
"""Entries below which a range is not split further."""
LEAST_AT_LONGEST = 256
"""Least entries of a split in a row as long as the page table allows."""
MOST_CHUNK_SPLITS = 16
"""Most splits of a chunk. Each split has a partial result for every token, and one tile combines them all."""
ROWS_AT_ONCE = tl.constexpr(256)
"""Lengths summed at once."""
LOG2_E = 1 / math.log(2)
_LOG2_E = tl.constexpr(LOG2_E)
CAUSAL, _WINDOW, _CHUNK = (tl.constexpr(int(reach)) for reach in Reach)


@triton.jit
def first_entry(position, REACH: tl.constexpr, SIZE: tl.constexpr):
    """Return the first entry that a query at `position` reads; see `Reach`."""
    first = position * 0
    if REACH == _WINDOW:
        first = tl.maximum(position - SIZE + 1, 0)
    if REACH == _CHUNK:
        first = tl.maximum(position - position % SIZE, 0)
    return first


@triton.jit
def first_tile(length, whole, REACH: tl.constexpr, SIZE: tl.constexpr):
    """Return the start of the first tile of `whole` entries that the last query of a row of `length` reads."""
    return first_entry(length - 1, REACH, SIZE) // whole * whole


@triton.jit
def with_sink(total, top, sinks, head):
    """Return the sum of weights with that of the sinks of heads `head`, relative to the largest score `top`."""
    if sinks is not None:
        sink = tl.load(sinks + head)
        # Fused by hand: results may have to be the same to the bit in several kernels.
        total += tl.exp2(tl.fma(sink, tl.full(sink.shape, _LOG2_E, tl.float32), -top))
    return total


@triton.jit
def _parts(lens, batch, size, whole, REACH: tl.constexpr, SIZE: tl.constexpr):
    """Return the number of parts of `size` entries that the rows of a batch read."""
    parts = 0
    for first in range(0, batch, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        length = tl.load(lens + row, mask=row < batch, other=0).to(tl.int32)
        parts += tl.sum(tl.cdiv(length - first_tile(length, whole, REACH, SIZE), size))
    return parts


@triton.jit
def split_size(
    lens, reads, batch, most, wanted, at_once, least, whole, HEADS: tl.constexpr, MANY: tl.constexpr,
    REACH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return the entries of a split of a row that `reads` entries, a multiple of `whole`: the batch makes about
    `wanted` programs.

    MANY: splits are lengthened to at most `at_once` programs, so that none runs after all others.
    """
    fair = tl.maximum(tl.cdiv(_parts(lens, batch, 1, whole, REACH, SIZE) * HEADS, wanted), least)
    if MANY:
        for _ in range(3):
            parts = _parts(lens, batch, fair, whole, REACH, SIZE)
            fair += tl.where(parts * HEADS > at_once, tl.cdiv(fair, 4), 0)
    splits = tl.minimum(tl.cdiv(reads, fair), most)
    return tl.cdiv(tl.cdiv(reads, tl.maximum(splits, 1)), whole) * whole


@triton.jit
def _combine(out, partial, logs, sinks, head, splits, D: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """Write one head's result [D] from its splits' results [splits, D] and log-sums [splits]; zeros from none."""
    D_PAD: tl.constexpr = triton.next_power_of_2(D)
    split = tl.arange(0, SPLITS_PAD)
    offs_d = tl.arange(0, D_PAD)
    there = (split < splits)[:, None] & (offs_d < D)[None, :]
    # Past the first-level cache: other programs wrote these.
    log = tl.load(logs + split, mask=split < splits, other=float("-inf"), cache_modifier=".cg")
    part = tl.load(partial + split[:, None] * D + offs_d[None, :], mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(log, 0)
    weight = tl.where(split < splits, tl.exp2(log - top), 0.0)
    whole = with_sink(tl.sum(weight, 0), top, sinks, head)
    done = tl.sum(part * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + offs_d, done.to(out.dtype.element_ty), mask=offs_d < D)


@triton.jit
def combine_if_last(
    out, partial, logs, sinks, arrived, row, head, splits, most, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Count a split that has stored its results; the last of a row combines the GROUP heads of KV head `head`."""
    own = row * HEADS + head
    arrived += own
    first = own.to(tl.int64) * GROUP
    all_stored()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1:
        tl.store(arrived, 0)
        for member in range(GROUP):
            one, query = first + member, head * GROUP + member
            _combine(out + one * D, partial + one * most * D, logs + one * most, sinks, query, splits, D, SPLITS_PAD)


@triton.jit(do_not_specialize=["batch", "most", "wanted", "least", "whole"], do_not_specialize_on_alignment=["lens"])
def combine_kernel(
    lens, out, partial, logs, sinks, batch, most, wanted, least, whole, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, SPLITS_PAD: tl.constexpr, EARLY: tl.constexpr, REACH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (query head, row): the row's result from its splits, if it has several."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(1)
    length = tl.load(lens + row).to(tl.int32)
    reads = length - first_tile(length, whole, REACH, SIZE)
    size = split_size(lens, reads, batch, most, wanted, 0, least, whole, HEADS, False, REACH, SIZE)
    splits = tl.cdiv(reads, tl.maximum(size, 1))
    if splits < 2:
        return
    one = row.to(tl.int64) * (HEADS * GROUP) + tl.program_id(0)
    _combine(out + one * D, partial + one * most * D, logs + one * most, sinks, tl.program_id(0), splits, D, SPLITS_PAD)


@triton.jit(do_not_specialize=["splits"])
def combine_chunks_kernel(
    out, partial, logs, sinks, splits, GROUP: tl.constexpr, D: tl.constexpr, SPLITS_PAD: tl.constexpr
):  # fmt: skip
    """Program (KV head, token): combine the splits of a token for each query head of the KV head. A first log-sum of
    infinity marks a token of an unsplit chunk."""
    first = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * GROUP
    if tl.load(logs + first * splits) == float("inf"):
        return
    for member in range(GROUP):
        one, head = first + member, tl.program_id(0) * GROUP + member
        _combine(out + one * D, partial + one * splits * D, logs + one * splits, sinks, head, splits, D, SPLITS_PAD)


def split_count(batch: int, kv_heads: int, longest: int, wanted: int, grid: int) -> int:
    """Return the most splits of a row, from the host's bounds: constant for a captured launch.

    `wanted` programs with work, of `grid` in all; no row gets more than its share.
    """
    return max(1, min(-(-wanted // kv_heads), grid // (batch * kv_heads), longest // LEAST_AT_LONGEST, MOST_SPLITS))


def chunk_split_count(blocks: int, kv_heads: int, longest: int, processors: int) -> int:
    """Return the splits of each chunk, given `blocks` of queries in all: about one program for each multiprocessor."""
    return max(1, min(processors // (blocks * kv_heads), longest // LEAST_AT_LONGEST, MOST_CHUNK_SPLITS))


def most_read(longest: int, reach: int, size: int) -> int:
    """Return the most entries that a query reads of a row of at most `longest`."""
    return longest if reach == Reach.CAUSAL else min(longest, size)


def split_space(q: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return float32 memory for the results of this many splits of queries q [T, heads, D], and for their log-sums."""
    # Results first: then the log-sums are always aligned.
    count = q.shape[0] * q.shape[1] * splits
    space = torch.empty(count * (q.shape[2] + 1), dtype=torch.float32, device=q.device)
    return space[: count * q.shape[2]], space[count * q.shape[2] :]
