"""The programs of every kind that an engine may run, for compilation before the first step."""

from __future__ import annotations

from collections.abc import Iterator

from gapless.step import lanes
from gapless.step.graphs import bucket_key, buckets_up_to, drafted_steps
from gapless.step.keys import ProgramKey, SampleKey
from gapless.step.lane import LaneSizes
from gapless.step.listing import LANE_SIZES

KIND_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Chunk tokens that may select different tiles of attention, for any number of heads that share keys. Longer chunks use
the last one's."""
BESIDE_DECODE = (2, 16)
"""Chunk tokens that represent all chunks in steps with decode rows."""


def kinds(
    rows: int, most: int, tokens: int, places: tuple[int, ...] = (), drafted_rows: int = 0
) -> Iterator[ProgramKey]:
    """Yield the programs of an engine of `rows` rows and steps of up to `most` padded rows and `tokens` tokens. Steps
    with drafts have up to `drafted_rows` decode rows, of one of these `places`.

    Kernels are specialised by alignment and powers of two, so that few shapes cover all.
    """
    for count in (*buckets_up_to(rows)[::-1], min(5, rows)):
        yield bucket_key(count, 0)
        yield SampleKey(count, count, False)
    for decode in sorted({rows, rows // 2, min(64, rows), 2, 1, 0}, reverse=True):
        if decode < min(most, tokens):
            for size in BESIDE_DECODE if decode else KIND_TOKENS:
                yield bucket_key(decode, 0, 1, min(size, tokens - decode))
            yield SampleKey(decode + 1, decode + 1, True)
    # Attention is split in the shapes above. Many chunks, or one long chunk, need the unsplit kernel.
    yield from (bucket_key(0, 0, min(rows, most, tokens), min(size, tokens)) for size in KIND_TOKENS)
    yield bucket_key(0, 0, 1, tokens)
    yield SampleKey(1, 0, True)
    sizes = tuple([size for size in LANE_SIZES if size <= rows])
    most_drafted = min(rows, drafted_rows)
    drafted = tuple([(size, most_drafted, each) for size in sizes if size <= most_drafted for each in places])
    for lane in lanes.LANES:
        yield from lane.kinds(LaneSizes(sizes, places, drafted))
    if places:
        yield from _drafted(most_drafted, min(most, tokens), places)


def largest(rows: int, tokens: int, max_len: int, places: int, drafted_rows: int) -> Iterator[ProgramKey]:
    """Yield the programs that take the most memory, of an engine of `rows` rows and steps of up to `tokens` tokens, at
    the greatest lengths: decode rows, with drafts in up to `places` places, and a chunk at each end of a sequence."""
    count = min(tokens, max_len)
    for decode, each in {(rows, 1), (drafted_rows, places)}:
        yield bucket_key(decode, max_len, places=each)
        yield SampleKey(decode, decode, False, each, drafts=each > 1)
    first = bucket_key(0, max_len, 1, count)
    yield first
    yield first._replace(batch=first.batch._replace(chunks=((max_len - count, count),)))
    for lane in lanes.LANES:
        yield from lane.likely(LaneSizes((rows,), (), ()))


def _drafted(rows: int, most: int, places: tuple[int, ...]) -> Iterator[ProgramKey]:
    """Yield the programs of steps of up to `rows` rows with drafts. Steps with chunks run the most drafts, or none."""
    yield from drafted_steps((*buckets_up_to(rows)[::-1], min(5, rows)), places)
    for decode in sorted({rows, rows // 2, 2, 1} - {0}, reverse=True):
        if decode < most:
            yield from (bucket_key(decode, 0, 1, min(size, most - decode), places=places[-1]) for size in BESIDE_DECODE)
            yield SampleKey(decode + 1, decode + 1, True, places[-1], drafts=True)
