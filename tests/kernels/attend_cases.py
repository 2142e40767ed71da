"""Cases of attention: what a layer asks for (`Attend`), by shapes of batches, and what it ought to give.

Every implementation runs the one table. An operation is called as `seam.Kernels` has it: `decode(q, kv, batch, attend)`
and `prefill(q, kv, batch, attend, max_query)`; wrap it to set how it splits. NaN is in every entry that no query of
a row reads: before the first one, after the last one, in pages that nobody owns, and in all pages of the table that
the row has no more use for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from paged import LAYER, Heads, Paged, dense, paged, queries
from torch import Tensor

from gapless.kernels.kinds import Reach
from gapless.kernels.views import Attend, RowBatch

Operation = Callable[..., Tensor]
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Those of 16 bits are results about four in size, rounded."""
WILD = 1e4
"""A value that is seen in a result if it is read with any weight at all"""


class Kind(NamedTuple):
    """What a layer asks for. `scale` None: D^-0.5. `spans`: spans of queries, by their start and size, again and again
    after `gap` tokens."""

    reach: Reach = Reach.CAUSAL
    size: int = 0
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    spans: tuple[int, ...] = ()
    gap: int = 3

    def attend(self, heads: Heads, device: str = "cpu") -> Attend:
        sinks = torch.randn(heads.query, generator=torch.Generator().manual_seed(3)) * 3 if self.sinks else None
        scale = heads.dim**-0.5 if self.scale is None else self.scale
        return Attend(scale, self.reach, self.size, self.softcap, None if sinks is None else sinks.to(device))

    def first(self, position: int) -> int:
        """The first entry that a query reads, without its span."""
        if self.reach == Reach.WINDOW:
            return max(0, position - self.size + 1)
        return position // self.size * self.size if self.reach == Reach.CHUNK else 0

    def spans_of(self, length: int) -> list[tuple[int, int]]:
        """The span of every position of a row, of which the last may end after the row does."""
        found: list[tuple[int, int]] = []
        for size in itertools.cycle(self.spans or (1,)):
            found += [(at, at + 1) for at in range(len(found), len(found) + (self.gap if self.spans else 0))]
            found += [(len(found), len(found) + size)] * size
            if len(found) >= length:
                return found[:length]
        raise AssertionError

    def ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """What the queries of positions start..end read of a row with `end` entries."""
        spans = self.spans_of(end)
        return [
            (min(self.first(at), spans[at][0]), max(at + 1, min(spans[at][1], end))) for at in range(start, end)
        ]  # fmt: skip


class Shape(NamedTuple):
    """Rows of `lengths`. Of each, the last one is a decode row's query, and the last `sizes` are those of a chunk."""

    heads: Heads
    page_size: int = 16
    lengths: tuple[int, ...] = (1, 5, 33, 70)
    sizes: tuple[int, ...] = (1, 3, 33, 9)


class Case(NamedTuple):
    kind: Kind
    shape: Shape

    def __str__(self) -> str:
        kind, heads = self.kind, self.shape.heads
        words = [kind.reach.name.lower(), *([str(kind.size)] if kind.size else [])]
        words += [name for name in ("softcap", "sinks", "scale", "spans") if getattr(kind, name) not in (0, None, ())]
        return "-".join([*words, "x".join(map(str, heads)), str(self.shape.page_size), str(max(self.shape.lengths))])


WINDOW, CHUNK = Reach.WINDOW, Reach.CHUNK
MIXED = [
    Kind(WINDOW, 24, softcap=5, sinks=True, scale=0.3), Kind(CHUNK, 20, softcap=5, sinks=True, scale=0.3),
    Kind(WINDOW, 8, spans=(20, 2, 11)), Kind(WINDOW, 9, softcap=2, sinks=True, scale=0.2, spans=(1, 30, 7), gap=0),
]  # fmt: skip
"""Everything at once"""
PLAIN = [Kind(), Kind(scale=0.3), Kind(softcap=5), Kind(sinks=True), Kind(softcap=1.5, sinks=True, scale=0.5)]
WINDOWS = [Kind(WINDOW, size) for size in (16, 1, 2, 15, 17, 33, 64, 100, 512, 5000)]
CUT = [Kind(CHUNK, size) for size in (16, 1, 3, 33, 64, 100, 5000)]
CAPPED = [
    Kind(reach, size, softcap, sinks) for reach, size in ((WINDOW, 16), (WINDOW, 40), (CHUNK, 32))
    for softcap, sinks in ((30.0, False), (0.0, True), (3.0, True))
]  # fmt: skip
SPANS = [
    Kind(spans=(5, 40, 2)), Kind(CHUNK, 16, spans=(24, 3)), Kind(WINDOW, 8, sinks=True, spans=(20, 2)),
    Kind(WINDOW, 32, softcap=4, spans=(7, 50)), Kind(WINDOW, 5000, spans=(9,)), Kind(WINDOW, 1, spans=(6,), gap=4),
]  # fmt: skip
KINDS = [*MIXED, *PLAIN, *WINDOWS, *CUT, *CAPPED, *SPANS]
SMALL = Shape(Heads(4, 2, 16))
OTHERS = [
    Shape(Heads(3, 1, 80), 5), Shape(Heads(2, 2, 64), 8, (1, 40, 17), (1, 40, 2)), Shape(Heads(8, 1, 32), 32),
    Shape(Heads(7, 1, 128), 16, (16, 48, 3), (16, 7, 3)), Shape(Heads(2, 1, 256), 16, (1, 50), (1, 20)),
    Shape(Heads(10, 2, 16), 3, tuple(range(1, 30)), (1, *(n // 2 for n in range(2, 30)))),
]  # fmt: skip
"""Other heads and pages, and many rows"""
LENGTHS, SIZES = (1, 5, 16, 17, 64, 65, 130, 700, 1030), (1, 5, 9, 17, 1, 33, 100, 200, 2)
"""Around the page, C++'s block of 64 keys and its split of 512"""
LONG = [Shape(Heads(4, 2, 64), 16, LENGTHS, SIZES), Shape(Heads(7, 1, 80), 16, LENGTHS, SIZES)]
GPU = [
    Shape(heads, 16, (1, 15, 16, 17, 255, 1000, 4097, 300), (1, 15, 3, 17, 129, 300, 5, 64))
    for heads in (Heads(16, 8, 128), Heads(28, 4, 128), Heads(8, 2, 64), Heads(4, 4, 80), Heads(8, 1, 256))
]  # fmt: skip


def crossed(shapes: list[Shape]) -> list[Case]:
    """Everything at once in every shape, and every kind in the first."""
    return [*(Case(kind, shape) for shape in shapes for kind in MIXED), *(Case(kind, shapes[0]) for kind in KINDS[4:])]


SHORT_CASES = crossed([SMALL, *OTHERS])
CPU_CASES = [*SHORT_CASES, *crossed(LONG)]
GPU_CASES = [*SHORT_CASES, *crossed(GPU), *(Case(kind, GPU[1]) for kind in CAPPED)]
SPLIT_CASES = [
    Case(Kind(reach, size, softcap, sinks=True), Shape(Heads(4, 2, 16), 16, lengths, (1,) * len(lengths)))
    for reach, size, softcap in ((WINDOW, 20, 0), (Reach.CAUSAL, 0, 2.0), (CHUNK, 128, 2.0), (WINDOW, 300, 3.0))
    for lengths in ((700, 1, 2, 130), (1025,))
]
"""For decode in 1 to 64 splits, many of which have nothing to read"""


def hostile(made: Paged, reads: list[tuple[int, int]]) -> Paged:
    """Row i is only ever read at entries reads[i]: all others are NaN, and the pages that hold none of them are away.
    The page table is a part of a wider one."""
    page_size = made.cache.shape[3]
    nowhere = torch.full_like(made.cache[:1], torch.nan)
    cache, table = torch.cat((made.cache, nowhere)), made.page_table
    for row, (first, end) in zip(made.rows.tolist(), reads, strict=True):
        away = first // page_size
        cache[table[row, away].long(), :, :, : first % page_size] = torch.nan
        if end % page_size:
            cache[table[row, end // page_size].long(), :, :, end % page_size :] = torch.nan
        table[row, :away] = len(made.cache)
        table[row, -(-end // page_size) :] = len(made.cache)
    wide = torch.full((len(table), 2 * table.shape[1] + 1), len(made.cache), dtype=table.dtype, device=table.device)
    part = wide[:, 1 : 1 + table.shape[1]]
    part.copy_(table)
    return made._replace(cache=cache, page_table=part)


class Given(NamedTuple):
    """Arguments of an operation, and what each query reads."""

    q: Tensor
    made: Paged
    batch: RowBatch
    attend: Attend
    row_of: list[int]
    ranges: list[tuple[int, int]]

    def wanted(self) -> Tensor:
        return dense(self.q[: len(self.ranges)], self.made, self.row_of, self.ranges, self.attend)


def for_decode(case: Case, dtype: torch.dtype, device: str = "cpu") -> Given:
    """Decode rows; spans are for prompts."""
    kind, (heads, page_size, lengths, _) = case.kind._replace(spans=()), case.shape
    ranges = [(kind.first(n - 1), n) for n in lengths]
    made = hostile(paged(heads, list(lengths), page_size=page_size, dtype=dtype, device=device), ranges)
    q = queries(heads, len(lengths), dtype=dtype, device=device)
    return Given(q, made, made.batch, kind.attend(heads, device), list(range(len(lengths))), ranges)


def for_prefill(case: Case, dtype: torch.dtype, device: str = "cpu", padding: int = 3) -> Given:
    """Chunks, and tokens of no row after them."""
    kind, (heads, page_size, lengths, sizes) = case
    of_rows = [kind.ranges(n - size, n) for n, size in zip(lengths, sizes, strict=True)]
    reads = [(min(first for first, _ in row), max(end for _, end in row)) for row in of_rows]
    made = hostile(paged(heads, list(lengths), page_size=page_size, dtype=dtype, device=device), reads)
    starts = torch.tensor([0, *itertools.accumulate(sizes)], device=device)
    spans = [span for n, size in zip(lengths, sizes, strict=True) for span in kind.spans_of(n)[n - size :]]
    spans += [(0, 1)] * padding
    given = torch.tensor(spans, dtype=torch.int32, device=device) if kind.spans else None
    batch = made.batch._replace(starts=starts, spans=given)
    row_of = [row for row, size in enumerate(sizes) for _ in range(size)]
    q = queries(heads, sum(sizes) + padding, dtype=dtype, device=device)
    return Given(q, made, batch, kind.attend(heads, device), row_of, [pair for row in of_rows for pair in row])


def near(got: Tensor, wanted: Tensor) -> None:
    """Sums of entries of about one in size; the result's own rounding is relative to it."""
    assert got.isfinite().all()
    rounding = torch.finfo(got.dtype).eps / 2
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=rounding, atol=LIMITS[got.dtype])


def check_decode_case(op: Operation, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    given = for_decode(case, dtype, device)
    near(op(given.q, given.made.kv, given.batch, given.attend), given.wanted())


def check_prefill_case(op: Operation, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """Padding tokens have any result."""
    given = for_prefill(case, dtype, device)
    got = op(given.q, given.made.kv, given.batch, given.attend, max(case.shape.sizes))
    near(got[: len(given.ranges)], given.wanted())


def check_edges(op: Operation, kind: Kind, length: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """One large value at each end of what the last query of a row reads: inside it counts, outside it does not.

    `op` is decode. Spans are left out.
    """
    heads = Heads(4, 2, 64)
    made = paged(heads, [length, 40], dtype=dtype, device=device)
    attend, q = kind.attend(heads, device), queries(heads, 2, dtype=dtype, device=device)
    first = kind.first(length - 1)
    clean = op(q, made.kv, made.batch, attend)
    for place, read in ((first - 1, False), (first, True), (length - 1, True)):
        if place >= 0:
            cache = made.cache.clone()
            cache[made.page_table[made.rows[0], place // 16].long(), LAYER, 1, place % 16] = WILD
            got = op(q, made.kv._replace(cache=cache), made.batch, attend)
            assert torch.equal(got[1], clean[1])
            if read:
                assert (got[0] - clean[0]).abs().min() > 1, (place, first)
            else:
                assert torch.equal(got[0], clean[0]), (place, first)


EDGES = [
    (Kind(reach, size, scale=0.02), length)
    for reach in (WINDOW, CHUNK)
    for size, length in ((16, 33), (16, 16), (1, 9), (16, 17), (17, 100), (64, 200), (48, 144), (300, 900))
]
"""Weights are nearly equal, so that each counts."""


def cut_everywhere(kind: Kind, length: int) -> Iterator[tuple[Case, int]]:
    """A prompt whose last chunk begins at each of its positions, after a prefix that is there already."""
    for start in range(length):
        yield Case(kind, SMALL._replace(lengths=(length,), sizes=(length - start,))), start
