"""What every drafter does that is part of a model: it is asked for drafts, draws them, and keeps them in the history.

Drafts are drawn with the noise with which the model draws at their positions. So at any temperature a draft is the
model's token about as often as the two distributions overlap; a greedy draft would be as often as the model draws it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
        """Return those of all places."""
        return cls(inputs.ids, inputs.positions, inputs.slots, inputs.rows, inputs.kv_lens)

    def split(self, places: int) -> list[PlaceTokens]:
        return list(map(PlaceTokens, *(column.chunk(places) for column in self)))

    def up_to(self, count: int) -> PlaceTokens:
        return PlaceTokens(*(column[:count] for column in self))

    def beyond(self, count: int) -> PlaceTokens:
        return PlaceTokens(*(column[count:] for column in self))


def ask(rows: Tensor, tables: Tables, drafts: int) -> None:
    rows = rows.long()
    length = tables.state[:, L.LENGTH].index_select(0, rows)
    params = tables.params.index_select(0, rows)
    room = torch.minimum(params[:, L.DRAFTS], params[:, L.MAX_LEN] - 1 - length).clamp(0, drafts)
    tables.state[:, L.DRAFTED].index_copy_(0, rows, length + room)


class Draws:
    """Draws the drafts of a step, one place after the other."""

    def __init__(self, kernels: Kernels, rows: Tensor, tables: Tables, vocab: int, ids: Tensor | None = None) -> None:
        """`ids` int64 [M] are the tokens that the M logits are for, None for all `vocab`."""
        state, params = tables.state.index_select(0, rows), tables.params.index_select(0, rows)
        state[:, L.CUT_VALUE].fill_(L.KEEP_VALUE)
        state[:, L.CUT_ID].fill_(L.KEEP_ID)
        params[:, L.ADJUST_SLOT].zero_()
        params[:, L.MASKED].zero_()
        self._tables = tables._replace(state=state, params=params)
        """The lines of these rows: their state is that at each place, as if the drafts before were their tokens"""
        self._rows = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        self._sample, self._vocab, self._ids = kernels.sample, vocab, ids
        self._all: Tensor | None = None
        """Logits of all tokens, where `ids` are some: others stay at -inf"""

    def next(self, logits: Tensor) -> Tensor:
        """Return the next draft of each row, int64 [B], from logits [B, M]."""
        if self._ids is not None:
            if self._all is None:
                self._all = logits.new_full((len(logits), self._vocab), -torch.inf)
            logits = self._all.index_copy_(1, self._ids, logits)
        tokens, _ = self._sample(logits, self._rows, self._tables, None)
        self._tables.state[:, L.LENGTH].add_(1)
        return tokens


def keep_drafts(drafted: PlaceTokens, tables: Tables) -> None:
    """Write drafts to the histories of their rows."""
    at = torch.add(drafted.positions, drafted.rows, alpha=tables.history.shape[1])
    at = torch.where(drafted.slots > 0, at, 0)  # drafts of no row go to the null row's first token
    tables.history.view(-1).index_copy_(0, at, drafted.ids.int())
