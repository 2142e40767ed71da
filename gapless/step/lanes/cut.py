"""The lane of rows with filters: the last token that top-k, top-p and min-p keep of the model's logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.kernels.views import Filters
from gapless.memory.rows import RowTable
from gapless.step.keys import LaneKey, SampleKey
from gapless.step.lane import Buffers, DeviceState, Lane, LaneSizes, Listed

EVERY_FILTERS = tuple([Filters(top_k, top_p) for top_k in (True, False) for top_p in (True, False)])
"""Filters that the rows of a list may use together"""


def filters_of(params: SamplingParams) -> Filters | None:
    """Return the filters of a row besides min-p; None for a row without any."""
    return Filters(params.top_k > 0, params.top_p < 1.0) if params.needs("cut") else None


def union(filters: Iterable[Filters]) -> Filters:
    return Filters(*map(any, zip(*filters, strict=True)))


class CutKey(NamedTuple):
    """Finds the cuts of rows' filters."""

    rows: int
    filters: Filters
    """Filters used by any listed row"""
    batch: int = 0
    """Rows of the batch, if they have drafts: the list then has each place of a row."""

    def run(self, state: DeviceState, at: Buffers, index: Tensor) -> None:
        state.kernels.cut(at.logits, index[: self.rows], at.rows(self.batch), state.tables, self.filters)


class CutLane(Lane):
    name = "cut"
    owns = (CutKey,)
    each_place = True

    def asks(self, request: Request) -> Filters | None:
        # The lane that adjusts logits finds the cuts of these.
        return None if request.params.needs("adjust") else filters_of(request.params)

    def listed(
        self, samples: tuple[int, ...], rows: list[int], asking: Mapping[int, Filters], table: RowTable
    ) -> Listed:
        return Listed(self, samples, union(asking[row] for row in rows))

    def keys(self, listed: Listed, size: int, sample: SampleKey) -> tuple[CutKey, None]:
        return CutKey(size * sample.places, listed.asked, sample.drafted), None

    def likely(self, steps: LaneSizes) -> Iterable[LaneKey]:
        return (CutKey(size, filters) for size in steps.sizes for filters in EVERY_FILTERS)
