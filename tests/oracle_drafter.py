"""Drafters that know what the checksum model says next, and err now and then."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gapless.kernels import plain
from gapless.kernels.layout import ACTIVE, DRAFTED, DRAFTS, LENGTH, MAX_LEN
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.loop.loop import Loop
from gapless.model.drafting.draft_model import DraftModel
from gapless.model.seam import BatchShape, KVCache, StepInputs
from gapless.pace.draft_gate import WITHOUT_DRAFTS, DraftGate, Verify
from gapless.step.speculation import Speculation
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
    """Drafts as `oracle` does, at the beginning of the step that verifies. Implements `model.drafting.seam.Head`."""

    oracle: Oracle
    model: ChecksumModel

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        assert 0 < drafts <= self.oracle.drafts
        self.oracle._replace(drafts=drafts)(plain.KERNELS, rows, tables)

    def forward(self, inputs: StepInputs, plan: Any, tables: Tables, cache: KVCache) -> Tensor:
        return self.model.forward(inputs, plan, cache)


class CountedPlan(tuple[int, ...]):
    """The checksum model's plan, which says too how many tokens are of rows that decode."""

    decode: int


class SharingModel(ChecksumModel):
    """The checksum model with a second layer of KV memory, which it leaves to a draft model."""

    def plan(self, shape: BatchShape) -> CountedPlan:
        plan = CountedPlan(super().plan(shape))
        plan.decode = shape.decode
        return plan

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        return KVCache.zeros(pages, 2, page_size, 1, 1, dtype=torch.int64, device=device)


class ErringDraft(ChecksumModel):
    """A checksum model that drafts another token with probability `errs`, by what it has read."""

    errs = 0.0

    def scores(self, hidden: Tensor) -> Tensor:
        wrong = (hidden * 40_503 + 977) % 1000 < 1000 * self.errs
        return super().scores(torch.where(wrong, hidden + 1, hidden))


def second_layer(cache: KVCache) -> KVCache:
    """The part of a SharingModel's memory that is its draft model's."""
    return KVCache(cache.data[:, 1:])


def drafted_by_model(model: ChecksumModel, drafts: int, errs: float, rows: int) -> Speculation:
    """A SharingModel drafts for itself, and errs."""
    draft = ErringDraft(model.vocab_size, model.max_model_len)
    draft.errs = errs
    return Speculation(drafts, None, rows, DraftModel(draft, model, plain.KERNELS, second_layer))


def cost(places: int, prompt: int) -> int:
    """What a step takes: twice as long with drafts as without."""
    return max(1, prompt) * (1 + (places > 1))


@contextmanager
def drafts_beside_chunks() -> Iterator[list[int]]:
    """Collects the number of decode rows of each step that runs drafts beside chunks."""
    found, decide = list[int](), DraftGate.decide_beside

    def look(gate: DraftGate, decode: tuple[int, ...], prompt: int, ending: int) -> Verify:
        verify = decide(gate, decode, prompt, ending)
        if verify.places > 1:
            found.append(len(decode))
        return verify

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftGate, "decide_beside", look)
        yield found


def numbers_at_random(seed: int, loop: Loop, speculation: Speculation) -> None:
    """Have each step without chunks run another number of drafts, whatever pays."""
    gate, rng = loop.launcher.gate, random.Random(seed)
    assert gate is not None
    decide, sizes = gate.decide, (1, *speculation.sizes)

    def draw(decode: tuple[int, ...]) -> Verify:
        return WITHOUT_DRAFTS if decide(decode) and not decode else Verify(rng.choice(sizes), drafts=True)

    gate.decide = draw  # type: ignore[method-assign]
