"""The lane of rows with log-probabilities. Prompt tokens are scored by the forward, from positions in the packet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gapless.base.records import Int32s, Request, StepPlan
from gapless.memory.rows import RowTable
from gapless.step.keys import LaneKey, SampleKey
from gapless.step.lane import Buffers, DeviceState, Lane, LaneSizes, Listed
from gapless.step.logprobs import PROMPT_WORDS, WIDTHS


class ScoreKey(NamedTuple):
    """Scores sampled tokens."""

    rows: int
    width: int
    """Number of most likely tokens for each."""
    batch: int = 0
    """Rows of the batch, if they have drafts: the list then has each place of a row."""

    def run(self, state: DeviceState, at: Buffers, index: Tensor) -> None:
        """Score the new tokens of the listed rows from their raw logits."""
        tokens, start = at.tokens[: self.batch] if self.batch else at.tokens, state.outbox.scores
        listed = index[: self.rows]
        state.kernels.score(at.logits, listed, at.words, tokens, state.tables, at.lines, start, self.width)


class ScoreLane(Lane):
    """A row's setting, and what rows ask for together, is the number of most likely tokens for each sampled one."""

    name = "score"
    owns = (ScoreKey,)
    each_place = scores = True

    def asks(self, request: Request) -> int | None:
        return request.params.logprobs

    def listed(self, samples: tuple[int, ...], rows: list[int], asking: Mapping[int, int], table: RowTable) -> Listed:
        return Listed(self, samples, max(asking[row] for row in rows))

    def keys(self, listed: Listed, size: int, sample: SampleKey) -> tuple[None, ScoreKey]:
        return None, ScoreKey(size * sample.places, listed.asked, sample.drafted)

    def likely(self, steps: LaneSizes) -> Iterable[LaneKey]:
        return (ScoreKey(size, width) for size in steps.sizes for width in WIDTHS)


def prompt_positions(
    plan: StepPlan, asking: Mapping[int, tuple[int, int]], table: RowTable
) -> tuple[tuple[Int32s, ...], int]:
    """Return the prompt positions to score in this step, each followed by a prompt token, and the largest wanted number
    of likely tokens. `asking` is row -> wanted number, and prompt length."""
    found, widest, at = [], 0, len(plan.decode)
    for index, chunk in enumerate(plan.chunks, len(plan.decode)):
        wanted, length = asking.get(chunk.row, (0, 0))
        count = min(chunk.size, length - 1 - chunk.start)
        if count > 0:
            places = np.empty((count, PROMPT_WORDS), np.int32)
            places[:, 0] = np.arange(at, at + count)
            places[:, 1] = index
            places[:, 2] = table.tokens[chunk.row, chunk.start + 1 : chunk.start + 1 + count]
            found.append(places)
            widest = max(widest, wanted)
        at += chunk.size
    return tuple(found), widest
