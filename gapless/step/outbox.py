"""The outbox: every byte that comes back from a step. One line a sampled row, behind a header line; then the lines
of log-probabilities, if any row asked for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.base.records import Int32s
from gapless.kernels.layout import OUTBOX_COLUMNS as COLUMNS
from gapless.step.logprobs import WIDTHS, LogprobShape


class Outbox(NamedTuple):
    """One step's outbox as the host reads it."""

    step: int
    """As `packet.step_word` has it."""
    rows: Int32s
    generations: Int32s
    tokens: Int32s
    flags: Int32s

    @classmethod
    def of(cls, raw: Int32s, samples: int) -> Outbox:
        """Views of a slot's words: the first `samples` lines, behind which only null rows follow."""
        table = raw[: table_words(samples)].reshape(-1, COLUMNS)
        assert samples <= table[0, 1], f"an outbox of {table[0, 1]} lines, {samples} were expected"
        lines = table[1:]
        return cls(int(table[0, 0]), lines[:, 0], lines[:, 1], lines[:, 2], lines[:, 3])


def table_words(lines: int) -> int:
    """Words of the header and so many lines; what stands behind them are lines of log-probabilities."""
    return (1 + lines) * COLUMNS


def slot_bytes(rows: int, tokens: int = 0) -> int:
    """The largest outbox: every row sampled, and every row and every token of the step scored."""
    words = table_words(rows) + LogprobShape(rows, tokens, WIDTHS[-1]).words
    return -(-words // COLUMNS) * COLUMNS * np.dtype(np.int32).itemsize
