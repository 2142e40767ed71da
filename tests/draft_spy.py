"""Notes what the head or draft model of an engine drafts, and with what noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor

from gapless.engine import wiring
from gapless.kernels.layout import ACTIVE, DRAFTED, LENGTH, SEED_HIGH, SEED_LOW, TEMPERATURE
from gapless.kernels.random import gumbel
from gapless.kernels.tables import Tables
from gapless.model.seam import KVCache, StepInputs


class Drafted(NamedTuple):
    """The known tokens of a row, and the drafts after them."""

    known: list[int]
    drafts: list[int]
    params: Tensor
    """What the row asked for"""

    def scores(self, logits: Tensor, draft: int, ids: Tensor) -> Tensor:
        """Return the logits of the tokens `ids` at the place of a draft, with the noise of that place."""
        temperature = float(self.params[TEMPERATURE].view(torch.float32))
        position, seed = torch.tensor([[len(self.known) + draft]]), self.params[None, SEED_LOW : SEED_HIGH + 1]
        return logits + temperature * gumbel(ids[None], 0, position, seed)[0]


class Spy:
    """A head that notes what it drafts. Works where steps run eagerly."""

    def __init__(self, head: Any) -> None:
        self.head, self.steps = head, list[tuple[Tensor, Tables]]()

    def beside(self, model: Any) -> Self:
        return self

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        self.head.ask(rows, tables, drafts)

    def forward(self, inputs: StepInputs, plan: Any, tables: Tables, cache: KVCache) -> Tensor:
        hidden = self.head.forward(inputs, plan, tables, cache)
        if inputs.places > 1:
            self.steps.append((inputs.rows.clone(), Tables(*(table.clone() for table in tables))))
        return hidden

    def seen(self) -> Iterator[Drafted]:
        for rows, (state, params, history, *_) in self.steps:
            for row in (row for row in set(rows.tolist()) - {0} if state[row, ACTIVE]):
                length, drafted = int(state[row, LENGTH]), int(state[row, DRAFTED])
                tokens = history[row, :drafted].tolist()
                yield Drafted(tokens[:length], tokens[length:], params[row])


def spy_on_drafts(monkeypatch: pytest.MonkeyPatch) -> list[Spy]:
    """From now on each engine that is built adds the spy of its head; their steps must run eagerly."""
    made, spies = wiring.speculation, list[Spy]()

    def spied(*asked: Any) -> Any:
        own = made(*asked)
        assert own is not None
        spies.append(Spy(own.head))
        return own._replace(head=spies[-1])

    monkeypatch.setattr(wiring, "speculation", spied)
    return spies
