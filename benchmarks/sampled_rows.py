"""Tables of rows that sample in one way or another, for the benchmarks of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.layout import (
    CUT_ID,
    CUT_VALUE,
    KEEP_ID,
    KEEP_VALUE,
    LENGTH,
    NO_TOKEN,
    STOP_IDS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)  # fmt: skip
from gapless.kernels.tables import Tables


class Way(NamedTuple):
    """How a row samples."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY, RANDOM = Way(), Way(0.8)
TOP_P_ROW, TOP_K_ROW = Way(0.8, 0, 0.9), Way(0.8, 20)


def sampled_rows(ways: Sequence[Way], device: str) -> tuple[Tensor, Tensor, Tables]:
    """The rows int32 [N], the indices int32 [F] of those with filters, and the tables."""
    tables = Tables.new(len(ways), 64, 4, torch.device("cpu"))
    state, params = tables.state[1:], tables.params[1:]
    state[:, LENGTH], state[:, CUT_VALUE], state[:, CUT_ID] = 77, KEEP_VALUE, KEEP_ID
    params[:, STOP_IDS:] = NO_TOKEN
    params[:, TOP_K] = torch.tensor([way.top_k for way in ways])
    params[:, TEMPERATURE] = torch.tensor([way.temperature for way in ways]).view(torch.int32)
    params[:, TOP_P] = torch.tensor([way.top_p for way in ways]).view(torch.int32)
    filtered = [index for index, way in enumerate(ways) if way.top_k or way.top_p < 1.0]
    rows = torch.arange(1, len(ways) + 1, dtype=torch.int32, device=device)
    index = torch.tensor(filtered, dtype=torch.int32, device=device)
    return rows, index, Tables(*(table.to(device) for table in tables))
