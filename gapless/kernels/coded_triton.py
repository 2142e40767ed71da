"""Linear layers of quantised weights on CUDA: the launches of `quantised_triton`, and the ways that use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.arch import Arch
from gapless.kernels.few_rows_triton import MOST_SPLIT_BLOCKS
from gapless.kernels.library_triton import arch, counters, launch_options, operator
from gapless.kernels.norm_triton import rms_norm
from gapless.kernels.quantised_triton import INT4, numbers_kernel, quantised_kernel, quantised_row_kernel
from gapless.kernels.tiles import choose_tiles, padded

CHUNK_BYTES = 16
"""Bytes of a row that one thread loads at once: a multiple of it is a row's length."""


NUMBERS_BLOCK = 2048
"""Bytes of a program that decodes"""


class RowTiles(NamedTuple):
    """Tiles of a product of one row."""

    columns: int
    each: int
    """Blocks of columns of a program"""
    chunks: int
    """Chunks of `CHUNK_BYTES` of a program"""
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
        wide, most = (32, 128) if self.nibbles else (16, 256)
        chunks = min(most, padded(self.depth // wide))
        columns = min(16, 2 * most // chunks)
        blocks = -(-self.columns // columns) * -(-self.depth // (chunks * wide))
        # Each of a multiprocessor's four programs reads its inputs once, and has the next weights under way.
        return RowTiles(columns, -(-blocks // (4 * arch.processors)), chunks, 4)


@dataclass(frozen=True)
class QuantisedProduct:
    """A product of several rows in 16 bits. A part of its depth has one scale: `group`, or 0 for the whole row's."""

    rows: int
    columns: int
    depth: int
    group: int
    rounded: bool = False
    """True if inputs are E4M3 codes: nothing is decoded then."""

    def tiles(self, arch: Arch) -> CodeTiles:
        rows, deep = self.rows, min(128, self.group & -self.group or 128)
        if rows > 64:
            return CodeTiles(128, 128, deep if self.rounded else min(64, deep), 8, 3, 2 if self.columns <= 4096 else 1)
        high, blocks = max(16, padded(rows)), -(-self.columns // 64)
        room = max(1, (2 if self.rounded else 3) * arch.processors // blocks)
        splits = min(4 if self.rounded else 8, 1 << room.bit_length() - 1, max(1, self.depth // 512))
        if self.rounded and not self.group and (rows <= 16 or (rows <= 32 and self.columns <= 4096)):
            return CodeTiles(high, 64, 256, 4, 4, splits)
        return CodeTiles(high, 64, deep, 4, 5 if self.rounded or rows > 16 else 8, splits)


def launch_codes(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, out: Tensor, kind: int,
    group: int, *, norm: Tensor | None = None, eps: float = 0.0, gated: bool = False, add: bool = False,
    factor: Tensor | None = None, tiles: RowTiles | CodeTiles | None = None, early: bool | None = None,
) -> None:  # fmt: skip
    """Write x [M, K] times a weight of these codes (uint8 [N, K], or [N, K / 2] of nibbles) to `out`, or add it.

    scale float32 [N, groups], zero uint8 [N, groups] of nibbles. x may be E4M3 codes with a `factor` float32 [M, 1] for
    an E4M3 weight. The others are as in `few_rows_triton.launch`."""
    (rows, depth), columns = x.shape, codes.shape[0]
    assert x.is_contiguous() and codes.is_contiguous() and scale.is_contiguous() and out.is_contiguous()
    assert codes.shape[1] % CHUNK_BYTES == 0
    gpu = arch(x.device)
    early = gpu.early if early is None else early
    shape: QuantisedRow | QuantisedProduct
    if rows == 1 and factor is None:
        shape = QuantisedRow(columns, depth, kind == INT4.value)
    else:
        shape = QuantisedProduct(rows, columns, depth, group, factor is not None)
    tiles = tiles or choose_tiles(shape, gpu)
    fixed = {
        "N": columns, "K": depth, "KIND": kind, "GROUP": group, "BIAS": bias is not None, "GATED": gated, "ADD": add,
        "EARLY": early, "BLOCK_N": tiles.columns, "num_warps": tiles.warps, **launch_options(early),
    }  # fmt: skip
    bias = x if bias is None else bias
    zero = codes if zero is None else zero
    grid = -(-columns // tiles.columns)
    if isinstance(tiles, RowTiles):
        assert x.element_size() == 2
        grid = -(-grid // tiles.each)
        splits = -(-codes.shape[1] // (tiles.chunks * CHUNK_BYTES))
    else:
        grid, splits = grid * -(-rows // tiles.rows), tiles.splits
    if norm is not None:
        x = rms_norm(x, norm, eps, early=early)
    parts = arrived = out
    if splits > 1:
        assert grid <= MOST_SPLIT_BLOCKS
        parts = torch.empty((splits, rows, columns), dtype=torch.float32, device=x.device)
        arrived = counters(x.device, MOST_SPLIT_BLOCKS)
    if isinstance(tiles, RowTiles):
        quantised_row_kernel[grid, splits](
            x.view(torch.int64), codes.view(torch.int32), scale, zero, bias, out, parts, arrived, CHUNKS=tiles.chunks,
            EACH=tiles.each, SPLITS=splits, **fixed,
        )  # fmt: skip
        return
    if factor is not None:
        codes = codes.view(x.dtype)
    quantised_kernel[grid, splits](
        x, scale if factor is None else factor, codes, scale, zero, bias, out, parts, arrived, rows, PACKED=gpu.early,
        BLOCK_M=tiles.rows, BLOCK_K=tiles.depth, SPLITS=splits, num_stages=tiles.stages, **fixed,
    )  # fmt: skip


def launch_numbers(codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, kind: int, group: int) -> None:
    """Write the numbers of a weight of these codes to `out` [N, K], each rounded once."""
    rows, depth = out.shape
    numbers_kernel[rows, -(-codes.shape[1] // NUMBERS_BLOCK)](
        codes, scale, codes if zero is None else zero, out, depth, kind, group, NUMBERS_BLOCK, num_warps=4
    )


def coded_linear(
    x: Tensor, factor: Tensor | None, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None,
    code: list[int], out: Tensor,
) -> None:  # fmt: skip
    """Write x [M, K] times a weight + bias to `out` [M, N]; see `launch_codes`. code: kind and group."""
    launch_codes(x, codes, scale, zero, bias, out, *code, factor=factor)


def coded_normed_linear(
    x: Tensor, norm: Tensor, eps: float, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None,
    code: list[int], gated: bool,
) -> Tensor:  # fmt: skip
    """Return rms_norm(x [M, K]) times a weight + bias [M, N], or [M, N // 2] after SiLU times gate."""
    out = x.new_empty(x.shape[0], codes.shape[0] // (2 if gated else 1))
    launch_codes(x, codes, scale, zero, bias, out, *code, norm=norm, eps=eps, gated=gated)
    return out


def coded_gated_linear(
    x: Tensor, factor: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, code: list[int], out: Tensor
) -> None:
    """Write SiLU times gate of x, E4M3 codes with a factor, times a weight + bias to `out` [M, N // 2]."""
    launch_codes(x, codes, scale, None, bias, out, *code, factor=factor, gated=True)


def coded_linear_add(
    x: Tensor, y: Tensor, factor: Tensor | None, codes: Tensor, scale: Tensor, zero: Tensor | None,
    bias: Tensor | None, code: list[int],
) -> None:  # fmt: skip
    """Do x [M, N] += y [M, K] times a weight + bias, in place and rounded once."""
    launch_codes(y, codes, scale, zero, bias, x, *code, add=True, factor=factor)


def decoded(codes: Tensor, scale: Tensor, zero: Tensor | None, code: list[int], out: Tensor) -> None:
    """Write the numbers of some rows of a weight to `out` [N, K]."""
    launch_numbers(codes, scale, zero, out, *code)


triton_decoded = operator(decoded, "out")
triton_coded_linear = operator(coded_linear, "out")
triton_coded_normed_linear = operator(coded_normed_linear)
triton_coded_gated_linear = operator(coded_gated_linear, "out")
triton_coded_linear_add = operator(coded_linear_add, "x")
