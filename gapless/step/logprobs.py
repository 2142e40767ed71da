"""Log-probabilities on the device, for the rows that ask: of the raw logits, in float32, brought home in the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gapless.base.params import MAX_LOGPROBS
from gapless.base.records import Float32s, Int32s
from gapless.kernels.layout import NO_TOKEN
from gapless.step.sampler import ranked

WIDTHS = (0, 1, 5, MAX_LOGPROBS)
"""Most likely tokens in a line: few widths, so that few programs serve all."""
PIECE_BYTES = 64 << 20
"""Float32 logits worked on at once. A prompt of thousands of tokens times a large vocabulary would be gigabytes."""

LINE_WORDS = 5
"""Row, generation, position, log-probability, rank; then the ids and the log-probabilities of the most likely."""
PROMPT_WORDS = 3
"""In the packet: a token's index in the batch, its row's index, and the prompt token that follows it."""


class LogprobShape(NamedTuple):
    """Counts that fix what a step scores and how much of it comes home."""

    samples: int = 0
    """Sampled rows that ask."""
    prompt: int = 0
    """Prompt positions."""
    width: int = 0
    """Most likely tokens a line, one of WIDTHS."""

    @property
    def lines(self) -> int:
        return self.samples + self.prompt

    @property
    def packet_words(self) -> int:
        return self.samples + PROMPT_WORDS * self.prompt

    @property
    def words(self) -> int:
        """In the outbox."""
        return self.lines * line_words(self.width)


NOTHING = LogprobShape()


def line_words(width: int) -> int:
    return LINE_WORDS + 2 * width


class LogprobLines(NamedTuple):
    """The lines as the host reads them, M of them. Position -1: no token was sampled there."""

    rows: Int32s
    generations: Int32s
    positions: Int32s
    """Place of the scored token in its sequence."""
    logprobs: Float32s
    """NaN where the logits were not finite."""
    ranks: Int32s
    top_ids: Int32s
    """[M, width]"""
    top_logprobs: Float32s
    """[M, width]"""

    @classmethod
    def of(cls, words: Int32s, shape: LogprobShape) -> LogprobLines:
        """Views of `words` [shape.words]."""
        lines: Int32s = words.reshape(shape.lines, -1)
        reals: Float32s = lines.view(np.float32)
        split = LINE_WORDS + shape.width
        return cls(
            *(lines[:, 0], lines[:, 1], lines[:, 2], reals[:, 3], lines[:, 4]),
            *(lines[:, LINE_WORDS:split], reals[:, split:]),
        )


class Scored(NamedTuple):
    """Who the scored tokens are, M of them, all int64."""

    rows: Tensor
    generations: Tensor
    positions: Tensor
    targets: Tensor
    """Token ids; NO_TOKEN where none was sampled."""


def lines(logits: Tensor, scored: Scored, width: int) -> Tensor:
    """int32 [M, line_words(width)] from float32 `logits` [M, vocab]."""
    target = scored.targets.clamp(min=0)
    logprob, rank, ids, tops = score(logits, target, width)
    positions = torch.where(scored.targets >= 0, scored.positions, -1)
    whole = torch.stack((scored.rows, scored.generations, positions), dim=1).int()
    parts = (whole, logprob.view(torch.int32)[:, None], rank.int()[:, None], ids.int(), tops.view(torch.int32))
    return torch.cat(parts, dim=1)


def score(logits: Tensor, target: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank [M] of `target` int64 [M]; ids and log-probabilities [M, width] of the most likely.

    Equal logits rank by id, as the sampler takes them, so that a greedy token has rank 1.
    """
    logprobs = logits.log_softmax(-1)
    index = target[:, None]
    own = logits.gather(1, index)
    before = (logits > own) | ((logits == own) & (torch.arange(logits.shape[1], device=logits.device) < index))
    chosen, rank = logprobs.gather(1, index).squeeze(1), before.sum(-1) + 1
    if not width:
        return chosen, rank, index[:, :0], logprobs[:, :0]
    ids = ranked(logits + 0.0, width)[1][:, :width]  # a zero has two signs, and they are equal
    tops = logprobs.gather(1, ids)
    missing = width - ids.shape[1]
    return chosen, rank, pad(ids, (0, missing), value=NO_TOKEN), pad(tops, (0, missing), value=-torch.inf)


def pieces(count: int, vocab: int) -> Iterator[slice]:
    """Ranges of `count` rows of logits, each within PIECE_BYTES or one row long."""
    size = max(1, PIECE_BYTES // (4 * vocab))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
