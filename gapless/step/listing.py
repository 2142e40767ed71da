"""Which rows of a step are in its lanes, by the settings of their requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gapless.base.records import Int32s, Request, StepPlan
from gapless.kernels.layout import score_words
from gapless.memory.rows import RowTable
from gapless.step import lanes
from gapless.step.keys import ForwardKey, SampleKey, StepKey
from gapless.step.lane import Lane, Listed
from gapless.step.lanes.score import prompt_positions
from gapless.step.logprobs import WIDTHS, LogprobShape

LANE_SIZES = (1, 4, 16, 64, 256)
"""[rows] Padded sizes of a lane: few, so that few graphs serve all; a lane is cheap next to a forward."""


class Lists(NamedTuple):
    """The rows of one step that need more than a token."""

    lanes: tuple[Listed, ...] = ()
    """The lanes with rows, in the order of LANES"""
    width: int = 0
    """Number of most likely tokens for each scored one, one of WIDTHS."""
    prompt: tuple[Int32s, ...] = ()
    """Positions to score, for each chunk with any: int32 [n, PROMPT_WORDS]."""
    adapted: bool = False
    """Whether some row of the batch has an adapter."""

    def beyond(self, decode: int, filled_up: int) -> Lists:
        """Return these lists for a batch of decode rows padded to `filled_up`, then the chunks."""
        more = filled_up - decode
        moved = [tuple([sample if sample < decode else sample + more for sample in one.samples]) for one in self.lanes]
        return self._replace(lanes=tuple([one._replace(samples=m) for one, m in zip(self.lanes, moved, strict=True)]))

    @property
    def prompts(self) -> int:
        """Number of scored prompt positions."""
        return sum(map(len, self.prompt))

    def logprobs(self, places: int) -> LogprobShape | None:
        """Return the scores of a step with `places` logits of each row; None for none."""
        sampled = places * sum([len(one.samples) for one in self.lanes if one.lane.scores])
        return LogprobShape(sampled, self.prompts, self.width) if sampled or self.prompt else None


NO_LISTS = Lists()


class Lanes:
    """Settings of the rows in lanes. A freed row keeps its settings until it is reused."""

    def __init__(self, rows: RowTable) -> None:
        self.table = rows
        self._sizes = (*(size for size in LANE_SIZES if size < rows.size), rows.size)
        self._asking: dict[Lane, dict[int, Any]] = {lane: {} for lane in lanes.LANES}
        """Lane -> row -> setting"""
        *firsts, self._lists = itertools.accumulate([lane.lists for lane in lanes.LANES], initial=0)
        self._first = dict(zip(lanes.LANES, firsts, strict=True))
        """Number of each lane's first list among all"""
        self._prompt: dict[int, tuple[int, int]] = {}
        """Row -> wanted number of most likely tokens for a prompt token, and prompt length."""
        self._adapters: set[int] = set()

    def size(self, count: int) -> int:
        """Return the padded length of a list of `count` rows."""
        return next(size for size in self._sizes if size >= count)

    def admit(self, row: int, request: Request) -> None:
        """Take over the settings of the row's new request."""
        for lane, asking in self._asking.items():
            asking.pop(row, None)
            if (setting := lane.asks(request)) is not None:
                asking[row] = setting
        self._prompt.pop(row, None)
        self._adapters.discard(row)
        if request.adapter:
            self._adapters.add(row)
        if request.params.prompt_logprobs is not None:
            self._prompt[row] = request.params.prompt_logprobs, len(request.tokens)

    def of(self, plan: StepPlan) -> Lists:
        if not (any(self._asking.values()) or self._prompt or self._adapters):
            return NO_LISTS
        adapted = not self._adapters.isdisjoint((*plan.decode, *(chunk.row for chunk in plan.chunks)))
        listed = tuple(self._listed([*plan.decode, *(chunk.row for chunk in plan.chunks if chunk.last)]))
        prompt, widest = prompt_positions(plan, self._prompt, self.table) if self._prompt and plan.chunks else ((), 0)
        widest = max([widest, *(one.asked for one in listed if one.lane.scores)])
        width = next(width for width in WIDTHS if width >= widest)
        listed = tuple([one._replace(asked=width) if one.lane.scores else one for one in listed])
        return Lists(listed, width, prompt, adapted)

    def _listed(self, rows: list[int]) -> Iterator[Listed]:
        """Yield the lists of a step that samples these rows."""
        for lane, asking in self._asking.items():
            if asking and (samples := tuple([sample for sample, row in enumerate(rows) if row in asking])):
                yield lane.listed(samples, [rows[sample] for sample in samples], asking, self.table)

    def key(self, forward: ForwardKey, drafts: bool, lists: Lists) -> StepKey:
        """Return the key of a step with these lists; `drafts` is whether rows get drafts for the next step."""
        samples, places = forward.samples, forward.batch.places
        sample = SampleKey(forward.packet.rows, samples, bool(forward.batch.chunks), places, drafts)
        if not lists.lanes:
            return StepKey(forward, sample)
        sizes = [self.size(len(one.samples)) for one in lists.lanes]
        keys = [one.lane.keys(one, size, sample) for one, size in zip(lists.lanes, sizes, strict=True)]
        before, after = (tuple([key for key in own if key is not None]) for own in zip(*keys, strict=True))
        scored = sum([size for one, size in zip(lists.lanes, sizes, strict=True) if one.lane.scores])
        travelling = self._lists - self._first[lists.lanes[0].lane]
        return StepKey(forward, sample, before, after, travelling, scored * places * score_words(lists.width))

    def padded(self, lists: Lists, batch: int, places: int) -> tuple[tuple[int, Int32s], ...]:
        """Return what travels, for such a batch: the number of each list, and its padded contents."""
        found = []
        for one in lists.lanes:
            size = self.size(len(one.samples))
            for number, values in enumerate(one.lane.sent(one, batch, places), self._first[one.lane]):
                found.append((number, filled(values, size * (len(values) // len(one.samples)))))
        return tuple(found)


def filled(indices: tuple[int, ...], size: int) -> Int32s:
    return np.array(indices + indices[-1:] * (size - len(indices)), np.int32)
