"""The outbox: all bytes that a step returns to the host.

A header and a line for each sampled row; then, at fixed places, the scores of sampled and of prompt tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.base.records import Int32s
from gapless.kernels.layout import LINE_FLAG, LINE_GENERATION, LINE_ROW, LINE_TOKENS, line_words, score_words
from gapless.step.logprobs import WIDTHS, LogprobLines, LogprobShape


class Outbox(NamedTuple):
    """One step's outbox as the host reads it, N sampled rows."""

    step: int
    """The step's number, by `packet.step_word`."""
    rows: Int32s
    generations: Int32s
    flags: Int32s
    tokens: Int32s
    """[N, W]: the row's tokens, REJECTED for each other draft, then NO_TOKEN"""


class OutboxShape(NamedTuple):
    """Bounds of an engine's steps, and offsets in an outbox, in words."""

    rows: int
    tokens: int
    """Tokens of a step; each may be scored."""
    width: int = 1
    """Most tokens of a row in a step."""

    @property
    def line(self) -> int:
        return line_words(self.width)

    @property
    def scores(self) -> int:
        """First word of the scores of sampled tokens."""
        return (1 + self.rows) * self.line

    @property
    def prompts(self) -> int:
        """First word of the scores of prompt tokens."""
        return self.scores + self.rows * self.width * score_words(WIDTHS[-1])

    @property
    def words(self) -> int:
        """Words of a slot: lines for every row, and scores of all its tokens and of every token of the step."""
        return -(-(self.prompts + self.tokens * score_words(WIDTHS[-1])) // self.line) * self.line

    def read(self, words: Int32s, samples: int) -> Outbox:
        """Return views of a slot's first `samples` lines; only lines of null rows follow."""
        lines = words[self.line : (1 + samples) * self.line].reshape(-1, self.line)
        tokens = lines[:, LINE_TOKENS : LINE_TOKENS + self.width]
        return _outbox(words, (lines[:, LINE_ROW], lines[:, LINE_GENERATION], lines[:, LINE_FLAG], tokens))

    @staticmethod
    def read_again(words: Int32s, last: Outbox) -> Outbox:
        """Return the views of a slot for another step with as many sampled rows."""
        return _outbox(words, last[1:])

    def read_scores(self, words: Int32s, shape: LogprobShape) -> LogprobLines:
        """Return scores of prompt tokens, then of sampled ones, as views if there is only one kind."""
        size = score_words(shape.width)
        sampled, prompt = (
            words[start : start + count * size].reshape(-1, size)
            for start, count in ((self.scores, shape.samples), (self.prompts, shape.prompt))
        )
        return LogprobLines.of(np.concatenate((prompt, sampled)) if shape.samples and shape.prompt else
                               sampled if shape.samples else prompt)  # fmt: skip


def _outbox(words: Int32s, columns: tuple[Int32s, Int32s, Int32s, Int32s]) -> Outbox:
    samples = len(columns[0])
    assert samples <= words[1], f"an outbox of {words[1]} lines, {samples} were expected"
    return Outbox(int(words[0]), *columns)
