"""Log-probabilities as the host requests and reads them; `kernels` computes them, for the rows that want them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.base.params import MAX_LOGPROBS
from gapless.base.records import Float32s, Int32s
from gapless.kernels import layout as L

WIDTHS = (0, 1, 5, MAX_LOGPROBS)
"""Numbers of most likely tokens in a line: few, so that few programs suffice."""
PROMPT_WORDS = 3
"""Words of a prompt position in the packet: its token's index in the batch, its row's index, and the next prompt
token."""


class LogprobShape(NamedTuple):
    """Counts that fix the scores of a step, and their copy to the host."""

    samples: int = 0
    """Sampled rows to score."""
    prompt: int = 0
    width: int = 0
    """Number of most likely tokens in a line, one of WIDTHS."""


class LogprobLines(NamedTuple):
    """M score lines as the host reads them. Position -1: no token was sampled there."""

    rows: Int32s
    generations: Int32s
    positions: Int32s
    """Place of the scored token in its sequence."""
    logprobs: Float32s
    """NaN for logits that were not finite."""
    ranks: Int32s
    top_ids: Int32s
    """[M, width]"""
    top_logprobs: Float32s
    """[M, width]"""

    @classmethod
    def of(cls, lines: Int32s) -> LogprobLines:
        """Return views of `lines` [M, layout.score_words(width)]."""
        reals: Float32s = lines.view(np.float32)
        split = (L.SCORE_TOP + lines.shape[1]) // 2
        return cls(
            lines[:, L.SCORE_ROW], lines[:, L.SCORE_GENERATION], lines[:, L.SCORE_POSITION], reals[:, L.SCORE_LOGPROB],
            lines[:, L.SCORE_RANK], lines[:, L.SCORE_TOP:split], reals[:, split:],
        )  # fmt: skip
