"""Linear layers of quantised weights on CUDA: the launches of `quantised_triton`, and the ways that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from gapless.kernels.arch import Arch
from gapless.kernels.few_rows_triton import MOST_SPLIT_BLOCKS
from gapless.kernels.library_triton import arch, counters, launch_options, operator
from gapless.kernels.norm_triton import rms_norm
from gapless.kernels.quantised_triton import INT4, quantised_kernel, quantised_row_kernel
from gapless.kernels.tiles import choose_tiles, padded

CHUNK_BYTES = 16
"""Bytes of a row that one thread loads at once: a multiple of it is a row's length."""


class RowTiles(NamedTuple):
    """Tiles of a product of one row."""

    columns: int
    chunks: int
    """Chunks of `CHUNK_BYTES` at a time"""
    warps: int


class CodeTiles(NamedTuple):
    """Tiles of a product of several rows."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int


@dataclass(frozen=True)
class QuantisedRow:
    """A product of one row."""

    columns: int
    depth: int
    nibbles: bool

    def tiles(self, arch: Arch) -> RowTiles:
        chunks = self.depth // (32 if self.nibbles else 16)
        return RowTiles(8, min(128, padded(chunks)), 4)


@dataclass(frozen=True)
class QuantisedProduct:
    """A product of several rows in 16 bits. A part of its depth has one scale: `group`, or 0 for the whole row's."""

    rows: int
    columns: int
    depth: int
    group: int
    nibbles: bool

    def tiles(self, arch: Arch) -> CodeTiles:
        rows = self.rows
        deep = min(128, self.group or 128)
        if rows <= 64:
            high = 16 if rows <= 16 else 32 if rows <= 32 else 64
            blocks = -(-self.columns // 64)
            splits = max(1, min(8, 264 // blocks, self.depth // 512))
            return CodeTiles(high, 64, deep, 4, 5, splits)
        return CodeTiles(128, 128, min(64, deep), 8, 3, 1)


def launch_codes(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, out: Tensor, kind: int,
    *, norm: Tensor | None = None, eps: float = 0.0, gated: bool = False, add: bool = False,
    tiles: RowTiles | CodeTiles | None = None, early: bool | None = None,
) -> None:  # fmt: skip
    """Write x [M, K] times a weight of these codes (uint8 [N, K], or [N, K / 2] of nibbles) to `out`, or add it.

    scale float32 [N, groups], zero uint8 [N, groups] of nibbles. The others are as in `few_rows_triton.launch`."""
    (rows, depth), columns, groups = x.shape, codes.shape[0], scale.shape[1]
    assert x.is_contiguous() and codes.is_contiguous() and scale.is_contiguous() and out.is_contiguous()
    assert codes.shape[1] % CHUNK_BYTES == 0
    gpu = arch(x.device)
    early = gpu.early if early is None else early
    group = 0 if groups == 1 else group_of(depth, groups)
    nibbles = kind == INT4.value
    if tiles is None:
        shape = QuantisedRow(columns, depth, nibbles) if rows == 1 else QuantisedProduct(
            rows, columns, depth, group, nibbles)  # fmt: skip
        tiles = choose_tiles(shape, gpu)
    fixed = {
        "N": columns, "K": depth, "KIND": kind, "GROUP": group, "BIAS": bias is not None, "GATED": gated, "ADD": add,
        "EARLY": early, "BLOCK_N": tiles.columns, "num_warps": tiles.warps, **launch_options(early),
    }  # fmt: skip
    bias = x if bias is None else bias
    zero = codes if zero is None else zero
    grid = triton.cdiv(columns, tiles.columns)
    if isinstance(tiles, RowTiles):
        quantised_row_kernel[(grid,)](
            x, x if norm is None else norm, codes.view(torch.int32), scale, zero, bias, out, eps, NORM=norm is not None,
            CHUNKS=tiles.chunks, **fixed,
        )  # fmt: skip
        return
    if norm is not None:
        x = rms_norm(x, norm, eps, early=early)
    grid *= triton.cdiv(rows, tiles.rows)
    parts = arrived = out
    if tiles.splits > 1:
        assert grid <= MOST_SPLIT_BLOCKS
        parts = torch.empty((tiles.splits, rows, columns), dtype=torch.float32, device=x.device)
        arrived = counters(x.device, MOST_SPLIT_BLOCKS)
    quantised_kernel[grid, tiles.splits](
        x, codes, scale, zero, bias, out, parts, arrived, rows, PACKED=gpu.wgmma or gpu.early, BLOCK_M=tiles.rows,
        BLOCK_K=tiles.depth, SPLITS=tiles.splits, num_stages=tiles.stages, **fixed,
    )  # fmt: skip


def group_of(depth: int, groups: int) -> int:
    """Return the inputs that share a scale: the power of two, if the last group may be short."""
    return padded(-(-depth // groups))
