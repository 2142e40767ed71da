"""The outbox: every byte that comes back from a step. One line a sampled row, behind a header line; then the lines
of log-probabilities, if any row asked for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gapless.base.records import Int32s
from gapless.step.logprobs import WIDTHS, LogprobShape

COLUMNS = 4
"""Header: step, lines, 0, 0. Line: row, generation, token, flag."""


class Outbox(NamedTuple):
    """One step's outbox as the host reads it."""

    step: int
    """As `packet.step_word` has it."""
    rows: Int32s
    generations: Int32s
    tokens: Int32s
    flags: Int32s

    @classmethod
    def of(cls, raw: Int32s) -> Outbox:
        """Views of a slot's words."""
        table = raw.reshape(-1, COLUMNS)
        lines = table[1 : 1 + int(table[0, 1])]
        return cls(int(table[0, 0]), lines[:, 0], lines[:, 1], lines[:, 2], lines[:, 3])


def table_words(lines: int) -> int:
    """Words of the header and so many lines; what stands behind them are lines of log-probabilities."""
    return (1 + lines) * COLUMNS


def slot_bytes(rows: int, tokens: int = 0) -> int:
    """The largest outbox: every row sampled, and every row and every token of the step scored."""
    words = table_words(rows) + LogprobShape(rows, tokens, WIDTHS[-1]).words
    return -(-words // COLUMNS) * COLUMNS * np.dtype(np.int32).itemsize


def assemble(step: Tensor, rows: Tensor, generations: Tensor, tokens: Tensor, flags: Tensor) -> Tensor:
    """int32 [1 + N, COLUMNS] on the device. `step` is int32 [1]; the others hold N entries."""
    count = torch.full_like(step, rows.shape[0])
    header = torch.stack((step, count, torch.zeros_like(step), torch.zeros_like(step)), dim=1)
    lines = torch.stack((rows.int(), generations, tokens.int(), flags), dim=1)
    return torch.cat((header, lines))
