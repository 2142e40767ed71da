"""Drafters that know what the checksum model says next, and err now and then."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.kernels import plain
from gapless.kernels.layout import ACTIVE, DRAFTED, DRAFTS, LENGTH, MAX_LEN
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.seam import KVCache, StepInputs
from gapless.testing.checksum import PRIME, ChecksumModel, entry, next_token, weight


class Oracle(NamedTuple):
    """Drafts the tokens that the model will say; each is another one with probability `errs`, by row and length."""

    vocab: int
    drafts: int
    errs: float

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        rows = rows.long()
        state, params, history = (table.index_select(0, rows).long() for table in tables[:3])
        length, position = state[:, LENGTH], torch.arange(history.shape[1], device=rows.device)
        terms = entry(history, position) * weight(position) % PRIME
        fold = torch.where(position < length[:, None], terms, 0).sum(1) % PRIME
        most = torch.minimum(params[:, DRAFTS], params[:, MAX_LEN] - 1 - length).clamp(0, self.drafts)
        most = torch.where(state[:, ACTIVE] != 0, most, 0)
        for index in range(self.drafts):
            place = (length + index).clamp(max=history.shape[1] - 1)
            token = next_token(fold, self.vocab)
            wrong = (place * 2_654_435_761 + rows * 40_503 + 977) % 1000 < 1000 * self.errs
            token = torch.where(wrong, (token + 1) % self.vocab, token)
            fold = (fold + entry(token, place) * weight(place)) % PRIME
            old = history.gather(1, place[:, None])[:, 0]
            tables.history.index_put_((rows, place), torch.where(index < most, token, old).int())
        drafted = torch.where(params[:, DRAFTS] > 0, length + most, state[:, DRAFTED])
        tables.state[:, DRAFTED].index_copy_(0, rows, drafted.int())


class OracleHead(NamedTuple):
    """Drafts as `oracle` does, at the beginning of the step that verifies. Implements `step.speculation.Head`."""

    oracle: Oracle
    model: ChecksumModel

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        assert drafts == self.oracle.drafts
        self.oracle(plain.KERNELS, rows, tables)

    def forward(self, inputs: StepInputs, plan: Any, tables: Tables, cache: KVCache) -> Tensor:
        return self.model.forward(inputs, plan, cache)
