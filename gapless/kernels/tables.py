"""The device tables: one row per running request, advanced by the device itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.layout import PARAM_COLUMNS, STATE_COLUMNS


class Tables(NamedTuple):
    """All int32, at fixed addresses. Row 0 is the null row.

    `state` [rows, STATE_COLUMNS]: generation, active, length (tokens known to the device), computed (tokens with KV),
    and down to which logit (bits of a float32), and to which id among tokens that have it, a token may be drawn.
    `params` [rows, PARAM_COLUMNS]: bounds, sampling settings, stop ids (padded with NO_TOKEN).
    `history` [rows, max_len]: token ids. `pages` [rows, groups * max_pages]: the page table, one part a page group.
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
