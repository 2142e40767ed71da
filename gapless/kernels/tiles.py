"""Tiles of kernels on a GPU, as data: one pure function of a computation and a GPU.

Nothing is measured at run time: a captured step must not depend on when it was warmed. No choice for AMD's GPUs
has run: tests compile each, and see that it fits.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from gapless.kernels.arch import Arch

PAIR_WEIGHT = 8 << 20
"""Two rows are multiplied one after the other, and not on the tensor cores, by matrices of up to this many elements"""
ONCE = 128
"""Programs that run at once if one fills a multiprocessor's shared memory with weights"""
PROGRAMS = 192
"""Target number of programs of an invariant product of few rows: enough to load the weight at full speed"""
MOST_DEPTH_SEGMENTS = 8
LEAST_SEGMENT_DEPTH = 256
"""Inputs below which a segment is not cut further"""
LOW_BLOCK_ROWS = 256
"""Most rows of batches with blocks of 64 rows. Larger batches have 128: the same instruction, in twice the warps."""

T_co = TypeVar("T_co", covariant=True)


class Tiled(Protocol[T_co]):
    """The computation of a kernel, as far as its tiles depend on it. Hashable, and equal to none of another class."""

    def tiles(self, arch: Arch) -> T_co: ...


@functools.cache
def choose_tiles(shape: Tiled[T_co], arch: Arch) -> T_co:
    """Return the tiles for a shape. GAPLESS_TILES=1 prints each choice once, on standard error."""
    tiles: Any = shape.tiles(arch)
    if hasattr(tiles, "stages"):
        tiles = tiles._replace(stages=arch.stages(tiles.stages))
    if os.environ.get("GAPLESS_TILES") == "1":
        print(f"{shape} on {arch.vendor} {'.'.join(map(str, arch.capability))}: {tiles}", file=sys.stderr)
    found: T_co = tiles
    return found


def padded(size: int) -> int:
    """Return the least power of two that is not below the size."""
    return 1 << (size - 1).bit_length()


class FewRowsTiles(NamedTuple):
    """Tiles of a product; `splits` of K and `stages` are for several rows."""

    columns: int
    depth: int
    warps: int
    stages: int = 1
    splits: int = 1


@dataclass(frozen=True)
class FewRowsProduct:
    """A product of few rows in 16 bits."""

    rows: int
    columns: int
    depth: int
    adapted: bool = False
    """Whether it adds the second half of adapters"""

    @property
    def in_turn(self) -> bool:
        """Whether rows are multiplied one after the other, and not on the tensor cores."""
        return self.rows == 1 or (self.rows == 2 and self.columns * self.depth <= PAIR_WEIGHT)

    def tiles(self, arch: Arch) -> FewRowsTiles:
        """Return one choice for rows in turn, one for up to 16 others, and one for more: there a row's result does not
        depend on its batch."""
        return self._in_turn() if self.in_turn else self._on_cores(arch)

    def _in_turn(self) -> FewRowsTiles:
        columns, depth = self.columns, self.depth
        block = padded(depth)
        if self.rows == 2:
            return FewRowsTiles(8, block, 4 if depth <= 1024 else 8) if depth <= 2048 else FewRowsTiles(2, 4096, 8)
        if depth <= 1024:
            return FewRowsTiles(8, min(512, block), 2) if columns > 4096 else FewRowsTiles(8, block, 8)
        if columns >= 4096:
            return FewRowsTiles(8, 1024, 4)
        return FewRowsTiles(4, 2048, 8) if depth <= 2048 or depth > 3072 else FewRowsTiles(4, 4096, 16)

    def _on_cores(self, arch: Arch) -> FewRowsTiles:
        rows, columns, depth = self.rows, self.columns, self.depth
        # A block may load its part of the weight at once, unless that is too large, or would take more blocks than run
        # at once.
        if arch.wgmma and depth <= 1024 and columns <= 64 * ONCE:
            return FewRowsTiles(64, max(128, padded(depth)), 8)
        splits = -(-depth // 512)
        if arch.wgmma and columns <= 2048 and splits <= (6 if rows <= 16 else 4) and splits * columns <= 64 * ONCE:
            return FewRowsTiles(64, 512, 8, 1, splits)
        if columns <= 2048:
            return FewRowsTiles(64, 256 if arch.large_blocks else 128, 4, 3, 4)
        stages = 6 if arch.large_blocks else 3
        if self.adapted and 64 * ONCE < columns <= 128 * ONCE:
            stages = min(stages, 4)  # two fit a multiprocessor: one multiplies while the other waits for its adapters
        return FewRowsTiles(64, 128, 4, stages, 2 if columns <= 4096 and depth >= 2048 else 1)


class StreamTiles(NamedTuple):
    """Tiles of a product by stream K."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    held: int
    """Parts of `depth` that a program loads before the previous kernel ends"""
    asked: int
    """Further parts that it asks of the cache"""


@dataclass(frozen=True)
class StreamProduct:
    """A product of few rows by a large weight in 16 bits, on Hopper: a program fills a multiprocessor's memory."""

    rows: int
    columns: int
    depth: int

    def tiles(self, arch: Arch) -> StreamTiles:
        return StreamTiles(16, 128, 128, 8, 4, 2, 1) if self.rows <= 16 else StreamTiles(32, 128, 128, 8, 4, 1, 1)


class ProductTiles(NamedTuple):
    """Tiles of an invariant product, a function of the weight's shape and dtype. Only `rows` and `warps` follow the
    batch."""

    rows: int
    columns: int
    depth: int
    segment: int
    """Inputs of a segment, a multiple of `depth`"""
    warps: int
    stages: int


@dataclass(frozen=True)
class InvariantProduct:
    """A product whose rows do not depend on their batch. float32 avoids tensor cores, which round it."""

    rows: int
    columns: int
    depth: int
    itemsize: int

    def tiles(self, arch: Arch) -> ProductTiles:
        # Without warp groups sums take twice the registers.
        half, few = (64, 128, 64, 4 if arch.warpgroups else 8, 4), (32, 64, 32, 4, 2)
        high, wide, deep, warps, stages = half if self.itemsize == 2 else few
        if self.itemsize == 2 and self.rows > LOW_BLOCK_ROWS:
            high, warps = 2 * high, 8
        wanted = min(PROGRAMS // -(-self.columns // wide), MOST_DEPTH_SEGMENTS, self.depth // LEAST_SEGMENT_DEPTH)
        segment = -(-self.depth // max(1, wanted))
        return ProductTiles(high, wide, deep, -(-segment // deep) * deep, warps, stages)


class AttentionTiles(NamedTuple):
    """Tiles of a kernel: query rows, KV entries, warps, stages of the software pipeline."""

    rows: int
    entries: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeAttention:
    """Attention of one query token a row."""

    head_dim: int
    itemsize: int
    group: int
    """Query heads of a KV head"""
    many: bool = False
    """Whether rows are cut into more and smaller programs; see `splits_triton.MANY_FROM`"""
    value_bits: int = 16
    """Bits of a stored value: 8 and 4 are converted, which takes time and registers"""

    def tiles(self, arch: Arch) -> AttentionTiles:
        dim, rows = padded(self.head_dim), max(16, padded(self.group))
        if self.itemsize > 2:
            return AttentionTiles(rows, 64 if dim <= 64 else 16, 4, 3)
        if self.value_bits < 16 and self.many and rows == 16 and dim <= 128:
            # To decode by whole numbers takes registers.
            return AttentionTiles(rows, 64 if arch.vendor == "amd" else 16 * self.value_bits, 4, 3)
        if self.many and rows == 16 and dim <= 128:
            return AttentionTiles(rows, max(16, 4096 // dim), 2, 4)
        return AttentionTiles(rows, max(32, 8192 // dim), 4, 3)


@dataclass(frozen=True)
class PromptAttention:
    """Attention of chunks of at most `max_query` tokens."""

    head_dim: int
    itemsize: int
    group: int
    max_query: int

    def tiles(self, arch: Arch) -> AttentionTiles:
        dim, rows = padded(self.head_dim), max(16, padded(self.group))
        needed = max(rows, padded(self.max_query * self.group))
        if self.itemsize > 2:
            small = dim <= 64
            return AttentionTiles(max(rows, min(32, needed)), 32 if small else 16, 4 if small else 8, 2)
        full = max(rows, min(128 if dim <= 128 else 64, needed))
        warps, stages = 8 if full >= 128 or dim > 128 else 4, 3 if dim == 128 else 2
        # More than 256 threads have too few registers each.
        return AttentionTiles(full, 64 if dim <= 128 else 32, min(warps, 256 // arch.warp), stages)


@dataclass(frozen=True)
class InvariantAttention:
    """Attention whose tiles are the same for every batch. 64 rows of queries: a decode row uses the instruction of a
    chunk."""

    head_dim: int
    itemsize: int
    group: int

    def tiles(self, arch: Arch) -> AttentionTiles:
        dim, least = padded(self.head_dim), padded(self.group)
        if self.itemsize > 2:
            return AttentionTiles(max(16, least), 32 if dim <= 64 else 16, 4, 2)
        # Without warp groups sums take twice the registers.
        entries, stages = (64, 3) if dim <= 64 and arch.warpgroups else (32, 4) if dim <= 128 else (16, 3)
        return AttentionTiles(max(64, least), entries, 4 if dim <= 128 and arch.warpgroups else 8, stages)
