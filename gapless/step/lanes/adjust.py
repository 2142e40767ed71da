"""The lane of rows with biases, penalties or processors: logits of their own, each row's in the slot that it leases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gapless.base.processors import MAX_ARGUMENTS, MAX_PROCESSORS
from gapless.base.records import Int32s, Request
from gapless.kernels.views import Filters
from gapless.memory.rows import RowTable
from gapless.step.keys import LaneKey, SampleKey
from gapless.step.lane import Buffers, DeviceState, Lane, LaneSizes, Listed
from gapless.step.lanes.cut import EVERY_FILTERS, filters_of, union
from gapless.step.processors import process


class AdjustKey(NamedTuple):
    """Adjusts logits of rows, and finds the cuts of their filters."""

    rows: int
    filters: Filters | None
    """Filters used by any listed row; None for none"""
    batch: int = 0
    """Rows of the batch, if they have drafts"""
    places: int = 1
    """Logits of each row"""
    processors: tuple[int, ...] = ()
    """Logits processors used by any listed row, ascending"""

    def run(self, state: DeviceState, at: Buffers, index: Tensor, slots: Tensor) -> None:
        """Adjust the logits of the listed rows into their slots, and find the cuts of their filters."""
        own, index, rows = state.adjustments, index[: self.rows], at.rows(self.batch)
        state.kernels.adjust(at.logits[: len(rows) * self.places], index, rows, state.tables, own)
        if self.processors:
            process(state.processors, self.processors, rows.index_select(0, index), state.tables, own)
        if self.filters is not None:
            listed = slots[: self.rows * self.places]
            state.kernels.cut(own.adjusted.flatten(0, 1), listed, own.owners, state.tables, self.filters)


class Adjusted(NamedTuple):
    """The setting of one row, or of the listed rows together."""

    filters: Filters | None
    processors: tuple[int, ...]
    slots: tuple[int, ...] = ()
    stride: int = 0
    """Slots of each place, the null slot included"""


class AdjustLane(Lane):
    """The second list has the slots of the rows in the first, place after place."""

    name = "adjust"
    owns = (AdjustKey,)
    lists = 2

    def asks(self, request: Request) -> Adjusted | None:
        if not request.params.needs(self.name):
            return None
        return Adjusted(filters_of(request.params), tuple([number for number, _ in request.processors]))

    def listed(
        self, samples: tuple[int, ...], rows: list[int], asking: Mapping[int, Adjusted], table: RowTable
    ) -> Listed:
        settings = [asking[row] for row in rows]
        filters = [one.filters for one in settings if one.filters is not None]
        processors = sorted({number for one in settings for number in one.processors})
        slots = tuple([table.leased[row][self.name] for row in rows])
        stride = table.slots[self.name].size + 1
        return Listed(self, samples, Adjusted(union(filters) if filters else None, tuple(processors), slots, stride))

    def sent(self, listed: Listed, batch: int, places: int) -> tuple[tuple[int, ...], ...]:
        stride, each = listed.asked.stride, range(places)
        return listed.samples, tuple([place * stride + slot for slot in listed.asked.slots for place in each])

    def keys(self, listed: Listed, size: int, sample: SampleKey) -> tuple[AdjustKey, None]:
        asked = listed.asked
        return AdjustKey(size, asked.filters, sample.drafted, sample.places, asked.processors), None

    def likely(self, steps: LaneSizes) -> Iterator[LaneKey]:
        for asked in ((), *[(number,) for number in range(steps.processors)]):
            for size, some in itertools.product(steps.sizes, (None, *EVERY_FILTERS)):
                yield AdjustKey(size, some, processors=asked)

    def kinds(self, steps: LaneSizes) -> Iterator[LaneKey]:
        yield from (AdjustKey(size, EVERY_FILTERS[0]) for size in steps.sizes)
        yield from (AdjustKey(size, EVERY_FILTERS[0], batch, places) for size, batch, places in steps.drafted)

    def wishes(self, request: Request) -> Int32s:
        """Return the contents of a request's slot, in the order of `layout`."""
        biases, allowed = request.params.logit_bias or {}, request.params.allowed_token_ids or ()
        ends = list(itertools.accumulate(map(len, request.bad_words)))
        values = np.array(list(biases.values()), np.float32).view(np.int32)
        head = np.array([len(biases), len(allowed), len(ends), len(request.tokens)], np.int32)
        tail = np.array([*allowed, *ends, *itertools.chain(*request.bad_words)], np.int32)
        return np.concatenate((head, _processor_words(request), np.array([*biases], np.int32), values, tail))

    def fill(self, state: DeviceState, row: int, slot: int, words: Tensor) -> None:
        """Write the wishes of a new row. Nothing is counted yet."""
        own = state.adjustments
        own.wishes[slot, : len(words)].copy_(words)
        own.counts[slot].zero_()
        own.counted[slot].zero_()
        own.owners[slot].fill_(row)


def _processor_words(request: Request) -> Int32s:
    """Return a bit for each processor of the request, and the arguments of each."""
    words = np.zeros(1 + MAX_PROCESSORS * MAX_ARGUMENTS, np.int32)
    given = words[1:].view(np.float32).reshape(MAX_PROCESSORS, MAX_ARGUMENTS)
    for number, arguments in request.processors:
        words[0] |= 1 << number
        given[number, : len(arguments)] = arguments
    return words
