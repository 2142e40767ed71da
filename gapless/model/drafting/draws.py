"""The base of drafters that are part of a model: it draws the drafts of a step, place by place.

Drafts are drawn with the model's own noise at their positions. So at any temperature a draft is the
model's token about as often as the two distributions overlap; a greedy draft would be as often as the model draws it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.kernels import layout as L
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.seam import StepInputs


class PlaceTokens(NamedTuple):
    """The tokens of some places of a step; tensors as in `StepInputs`."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    kv_lens: Tensor

    @classmethod
    def of(cls, inputs: StepInputs) -> PlaceTokens:
        """Return the drafts of all places."""
        return cls(inputs.ids, inputs.positions, inputs.slots, inputs.rows, inputs.kv_lens)

    def split(self, places: int) -> list[PlaceTokens]:
        return list(map(PlaceTokens, *(column.chunk(places) for column in self)))

    def up_to(self, count: int) -> PlaceTokens:
        return PlaceTokens(*(column[:count] for column in self))

    def beyond(self, count: int) -> PlaceTokens:
        return PlaceTokens(*(column[count:] for column in self))

    def keep(self, kernels: Kernels, tables: Tables) -> None:
        """Write these tokens, which are drafts, to the histories of their rows."""
        kernels.keep_drafts(self.ids, self.positions, self.rows, self.slots, tables)


class Draws:
    """Draws the drafts of a step, one place after the other: the leader for all ranks."""

    def __init__(
        self, kernels: Kernels, rows: Tensor, tables: Tables, vocab: int, ids: Tensor | None = None,
        group: Group = ONE_RANK,
    ) -> None:  # fmt: skip
        """`rows` int64 [B]; `ids` int64 [M] are the tokens that the M logits are for, None for all `vocab`."""
        self._kernels, self._rows, self._vocab, self._ids, self._group = kernels, rows, vocab, ids, group
        self._tables = tables if kernels.draft is not None else _lines_of(rows, tables)
        self._place = -1
        self._all: Tensor | None = None
        """Logits of all tokens if `ids` are some: others stay at -inf"""

    def next(self, logits: Tensor) -> Tensor:
        """Return the next draft of each row, int64 [B], from logits [B, M], which ranks that follow have none of."""
        if self._group.share.world == 1:
            return self._drawn(logits)
        drawn = (
            self._drawn(logits).int() if self._group.share.leads else torch.zeros_like(self._rows, dtype=torch.int32)
        )
        return self._group.tell(drawn).long()

    def _drawn(self, logits: Tensor) -> Tensor:
        self._place += 1
        if self._kernels.draft is not None:
            return self._kernels.draft(logits, self._ids, self._rows, self._tables, self._place, self._vocab)
        if self._ids is not None:
            if self._all is None:
                self._all = logits.new_full((len(logits), self._vocab), -torch.inf)
            logits = self._all.index_copy_(1, self._ids, logits)
        line = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        tokens, _ = self._kernels.sample(logits, line, self._tables, None)
        self._tables.state[:, L.LENGTH].add_(1)
        return tokens


def _lines_of(rows: Tensor, tables: Tables) -> Tables:
    """Return copies of the lines of these rows, without what decides about tokens beside temperature and noise."""
    state, params = tables.state.index_select(0, rows), tables.params.index_select(0, rows)
    state[:, L.CUT_VALUE].fill_(L.KEEP_VALUE)
    state[:, L.CUT_ID].fill_(L.KEEP_ID)
    params[:, L.ADJUST_SLOT].zero_()
    params[:, L.MASKED].zero_()
    return tables._replace(state=state, params=params)
