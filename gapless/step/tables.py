"""Device tables: one row per running request, advanced by the device itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.layout import (
    MAX_LEN,
    MIN_LEN,
    MIN_P,
    PARAM_COLUMNS,
    SEED_HIGH,
    SEED_LOW,
    STATE_COLUMNS,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)  # fmt: skip


class Tables(NamedTuple):
    """All int32, at fixed addresses. Row 0 is the null row.

    `state` [rows, 4]: generation, active, length (tokens known to the device), computed (tokens with KV).
    `params` [rows, PARAM_COLUMNS]: bounds, sampling settings, stop ids (padded with NO_TOKEN).
    `history` [rows, max_len]: token ids. `pages` [rows, max_pages]: the page table.
    """

    state: Tensor
    params: Tensor
    history: Tensor
    pages: Tensor

    @classmethod
    def new(cls, rows: int, max_len: int, max_pages: int, device: torch.device) -> Tables:
        """Tables for `rows` requests, the null row not counted."""

        def zeros(columns: int) -> Tensor:
            return torch.zeros(rows + 1, columns, dtype=torch.int32, device=device)

        return cls(zeros(STATE_COLUMNS), zeros(PARAM_COLUMNS), zeros(max_len), zeros(max_pages))


class RowParams(NamedTuple):
    """Views of the `params` of the sampled rows, N of them."""

    min_len: Tensor
    max_len: Tensor
    temperature: Tensor
    """[N, 1] float32"""
    top_k: Tensor
    """[N, 1] int32, 0 keeps all"""
    top_p: Tensor
    """[N, 1] float32"""
    min_p: Tensor
    """[N, 1] float32"""
    seed: Tensor
    """[N, 2] int32, low word first"""
    stop_ids: Tensor
    """[N, MAX_STOP_IDS] int32"""

    @classmethod
    def of(cls, params: Tensor) -> RowParams:
        def real(column: int) -> Tensor:
            return params[:, column : column + 1].view(torch.float32)

        return cls(
            min_len=params[:, MIN_LEN],
            max_len=params[:, MAX_LEN],
            temperature=real(TEMPERATURE),
            top_k=params[:, TOP_K : TOP_K + 1],
            top_p=real(TOP_P),
            min_p=real(MIN_P),
            seed=params[:, SEED_LOW : SEED_HIGH + 1],
            stop_ids=params[:, STOP_IDS:],
        )
