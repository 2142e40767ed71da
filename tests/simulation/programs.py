"""Step programs for the simulator, in which rows are held now and then, or get several tokens in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.base.records import NO_TOKEN
from gapless.kernels import plain
from gapless.kernels.layout import ACTIVE, HEADER_WORDS, LENGTH, MAX_LEN, PACKET_STEP
from gapless.model.seam import BatchShape, StepInputs
from gapless.step.inputs import Batch, split_groups
from gapless.step.keys import ForwardKey, SampleKey
from gapless.step.lane import Buffers
from gapless.step.program import StepProgram

TURNS = 4
"""A row that may be held is, once in so many steps."""


def drawn(step: Tensor, rows: Tensor, below: int) -> Tensor:
    """int64 [N]: a number for each row of this step, another one in the next."""
    mixed = (step.long() * 2_654_435_761 + rows.long() * 40_503 + 12_345) * 2_246_822_519
    return (mixed >> 13) % below


class Holding(StepProgram):
    """A row gets its token, or none and is held. The planner counts on a token, and must think again."""

    def sample(self, key: SampleKey, at: Buffers) -> None:
        self.step = at.words[PACKET_STEP : PACKET_STEP + 1]
        super().sample(key, at)

    def draw(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens, finite = super().draw(logits, rows)
        held = drawn(self.step, rows, TURNS) == 0
        return torch.where(held[:, None], NO_TOKEN, tokens), finite


class Several(Holding):
    """A row gets up to `width` tokens, or none. The KV of all is written, of those that it does not get with a lie.

    So it does what verifying drafts does: positions past the row's length hold KV that must never be read.
    """

    least, width = 0, 5

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.candidates = torch.zeros(self.outbox.rows, self.width, dtype=torch.int64, device=self.tables.state.device)

    def forward(self, key: ForwardKey, at: Buffers) -> None:
        super().forward(key, at)
        rows = at.words[HEADER_WORDS : HEADER_WORDS + key.samples].long()
        counts = self._counts(at.words[PACKET_STEP : PACKET_STEP + 1], rows)
        state = self.tables.state.index_select(0, rows)
        active, limit = state[:, ACTIVE].bool(), self.tables.params.index_select(0, rows)[:, MAX_LEN]
        token = at.logits[: key.samples].argmax(-1)
        for index in range(self.width):
            self.candidates[: key.samples, index].copy_(token)
            if index < self.width - 1:
                place = state[:, LENGTH].long() + index
                lie = (token + 13) % self.model.vocab_size
                ids = torch.where(index + 1 < counts, token, lie)
                token = self._next(ids, place, active & (place < limit - 1), rows)

    def _next(self, ids: Tensor, place: Tensor, runs: Tensor, rows: Tensor) -> Tensor:
        """Run one token more of each row, at `place`; returns the most likely one after it."""
        size = self.cache.page_size
        place = torch.where(runs, place, 0)
        slots = plain.kv_slots(self.tables.pages, rows, place, runs, size)
        columns = self.tables.pages.shape[1] // (1 + len(self.cache.others))
        inputs = StepInputs(ids, place, slots, torch.where(runs, place + 1, 1), rows, self.tables.pages, columns)
        batch = split_groups(Batch(inputs), self.cache)
        shape = BatchShape(len(rows), (), columns * size)
        return self.model.logits(self.model.forward(batch.inputs, self.model.plan(shape), self.cache)).argmax(-1)

    def draw(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        _, finite = self.kernels.sample(logits, rows, self.tables, None)
        index = torch.arange(self.width, device=rows.device)
        given = index < self._counts(self.step, rows)[:, None]
        return torch.where(given, self.candidates[: len(rows)], NO_TOKEN), finite

    def _counts(self, step: Tensor, rows: Tensor) -> Tensor:
        return drawn(step, rows, self.width + 1)


PROGRAMS = {"one": StepProgram, "held": Holding, "several": Several}
"""By the scenario's word for what a step gives to a row."""
