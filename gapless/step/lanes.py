"""The lanes of a step: rows that need more than a token. Other rows are in no lane.

A lane is a program over a list of the step's sampled rows. Its list has a fixed place before the packet and is padded
to one of few sizes with its last entry, which is recomputed with the same result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.base.params import Lane
from gapless.base.records import Int32s, Request, StepPlan
from gapless.kernels.views import Filters
from gapless.memory.rows import RowTable
from gapless.step.logprobs import PROMPT_WORDS, WIDTHS

LANE_SIZES = (1, 4, 16, 64, 256)
"""[rows] Padded sizes of a lane: few, so that few graphs serve all; a lane is cheap next to a forward."""


class Lists(NamedTuple):
    """The rows of one step that need more than a token, as indices of sampled rows in the batch."""

    cut: tuple[int, ...] = ()
    """Rows with filters."""
    filters: Filters = Filters(top_k=False, top_p=False)
    """Filters used by any of these rows."""
    score: tuple[int, ...] = ()
    width: int = 0
    """Number of most likely tokens for each scored one, one of WIDTHS."""
    adjust: tuple[int, ...] = ()
    """Rows with adjusted logits. Their filters are found there, and not in `cut`."""
    slots: tuple[int, ...] = ()
    adjusted: Filters | None = None
    """Filters used by any of these rows."""
    mask: tuple[int, ...] = ()
    processors: tuple[int, ...] = ()
    """Logits processors used by any of these rows, ascending"""
    prompt: tuple[Int32s, ...] = ()
    """Positions to score, for each chunk with any: int32 [n, PROMPT_WORDS]."""
    adapted: bool = False
    """Whether some row of the batch has an adapter."""

    def beyond(self, decode: int, filled_up: int) -> Lists:
        """Return these lists for a batch of decode rows padded to `filled_up`, then the chunks."""
        cut, score, adjust, mask = (
            tuple([index if index < decode else index - decode + filled_up for index in indices])
            for indices in (self.cut, self.score, self.adjust, self.mask)
        )
        return self._replace(cut=cut, score=score, adjust=adjust, mask=mask)

    def at_places(self, batch: int, slots: int, places: int) -> Lists:
        """Return these lists for `places` logits of each of `batch` rows, place after place, and of `slots` slots."""
        if places == 1:
            return self
        each = range(places)
        cut, score = (
            tuple([place * batch + index for index in indices for place in each]) for indices in (self.cut, self.score)
        )
        return self._replace(cut=cut, score=score, slots=tuple([p * slots + slot for slot in self.slots for p in each]))

    @property
    def prompts(self) -> int:
        """Number of scored prompt positions."""
        return sum(map(len, self.prompt))


NO_LISTS = Lists()


class Lanes:
    """Settings of the rows in lanes. A freed row keeps its settings until it is reused."""

    def __init__(self, rows: RowTable) -> None:
        self.table = rows
        self._sizes = (*(size for size in LANE_SIZES if size < rows.size), rows.size)
        self._cut: dict[int, Filters] = {}
        """Row -> filters of its cut, besides min-p."""
        self._score: dict[int, int] = {}
        """Row -> wanted number of most likely tokens for a sampled one."""
        self._adjust: dict[int, Filters | None] = {}
        """Row -> filters of its adjusted logits; None for none."""
        self._masked: set[int] = set()
        """Rows with matchers."""
        self._processors: dict[int, tuple[int, ...]] = {}
        """Row -> its logits processors, for rows of `_adjust`."""
        self._prompt: dict[int, tuple[int, int]] = {}
        """Row -> wanted number of most likely tokens for a prompt token, and prompt length."""
        self._adapters: set[int] = set()

    @property
    def slots(self) -> int:
        """Slots of adjusted logits, the null slot included."""
        return self.table.slots[Lane.ADJUST.value].size + 1

    def size(self, count: int) -> int:
        """Return the padded length of a list of `count` rows."""
        return next(size for size in self._sizes if size >= count)

    def admit(self, row: int, request: Request) -> None:
        """Take over the settings of the row's new request."""
        self._cut.pop(row, None)
        self._score.pop(row, None)
        self._adjust.pop(row, None)
        self._masked.discard(row)
        self._processors.pop(row, None)
        self._prompt.pop(row, None)
        self._adapters.discard(row)
        if request.adapter:
            self._adapters.add(row)
        params = request.params
        filters = Filters(params.top_k > 0, params.top_p < 1.0) if params.needs(Lane.CUT) else None
        if params.needs(Lane.ADJUST):
            self._adjust[row] = filters
            if request.processors:
                self._processors[row] = tuple([number for number, _ in request.processors])
        elif filters is not None:
            self._cut[row] = filters
        if request.matcher is not None:
            self._masked.add(row)
        if params.needs(Lane.SCORE):
            self._score[row] = params.logprobs or 0
        if params.needs(Lane.PROMPT):
            self._prompt[row] = params.prompt_logprobs or 0, len(request.tokens)

    def of(self, plan: StepPlan) -> Lists:
        if not (self._cut or self._score or self._adjust or self._masked or self._prompt or self._adapters):
            return NO_LISTS
        adapted = not self._adapters.isdisjoint((*plan.decode, *(chunk.row for chunk in plan.chunks)))
        rows = [*plan.decode, *(chunk.row for chunk in plan.chunks if chunk.last)]
        cut, score, adjust, mask = (
            tuple([index for index, row in enumerate(rows) if row in asking]) if asking else ()
            for asking in (self._cut, self._score, self._adjust, self._masked)
        )
        some = _union([self._cut[rows[index]] for index in cut])
        filters = [self._adjust[rows[index]] for index in adjust]
        adjusted = _union([one for one in filters if one is not None]) if any(filters) else None
        slots = tuple([self.table.leased[rows[index]][Lane.ADJUST.value] for index in adjust])
        processors = {number for index in adjust for number in self._processors.get(rows[index], ())}
        prompt, widest = self._places(plan) if self._prompt and plan.chunks else ((), 0)
        widest = max(widest, *(self._score[rows[index]] for index in score), 0)
        width = next(width for width in WIDTHS if width >= widest)
        return Lists(cut, some, score, width, adjust, slots, adjusted, mask, tuple(sorted(processors)), prompt, adapted)

    def _places(self, plan: StepPlan) -> tuple[tuple[Int32s, ...], int]:
        """Return the prompt positions to score in this step, and the largest wanted number of likely tokens.

        Each is followed by a prompt token.
        """
        found, widest, at = [], 0, len(plan.decode)
        for index, chunk in enumerate(plan.chunks, len(plan.decode)):
            wanted, length = self._prompt.get(chunk.row, (0, 0))
            count = min(chunk.size, length - 1 - chunk.start)
            if count > 0:
                places = np.empty((count, PROMPT_WORDS), np.int32)
                places[:, 0] = np.arange(at, at + count)
                places[:, 1] = index
                places[:, 2] = self.table.tokens[chunk.row, chunk.start + 1 : chunk.start + 1 + count]
                found.append(places)
                widest = max(widest, wanted)
            at += chunk.size
        return tuple(found), widest


def _union(filters: list[Filters]) -> Filters:
    return Filters(any(one.top_k for one in filters), any(one.top_p for one in filters))


def filled(indices: tuple[int, ...], size: int) -> Int32s:
    return np.array(indices + indices[-1:] * (size - len(indices)), np.int32)
