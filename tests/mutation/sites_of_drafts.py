"""The protections of drafts: which are kept, and what a step that runs them counts for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from mutation.tools import Site, replaced
from simulation.scenario import Scenario
from torch import Tensor

from gapless.kernels.drafts import drafts_of
from gapless.model.seam import BatchShape
from gapless.plan.bounds import Bounds
from gapless.step import program
from gapless.step.inputs import Batch
from gapless.step.program import StepProgram


def drafts(scenario: Scenario) -> bool:
    return scenario.drafts is not None


def believed() -> AbstractContextManager[None]:
    """What is sampled after a draft counts, whether the draft was right or not."""

    def draw(original: Callable[..., Any], self: StepProgram, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        given, finite = original(self, logits, rows)
        places = len(logits) // max(1, len(rows))
        if places > 1:
            sampled, _ = self.kernels.sample(logits, rows, self.tables, None)
            drafted = drafts_of(self.tables.state.index_select(0, rows), places)
            given = torch.where(torch.arange(places) <= drafted[:, None], sampled.view(places, -1).T, given)
        return given, finite

    return replaced(StepProgram, "draw", draw)


def one_token_a_step() -> AbstractContextManager[None]:
    """The planner counts on one token a step."""

    def init(original: Callable[..., None], self: Bounds, *given: Any) -> None:
        rows, page_size, least, _, *window = given
        original(self, rows, page_size, least, 1, *window)

    return replaced(Bounds, "__init__", init)


def first_places_alone() -> AbstractContextManager[None]:
    """Beside chunks, a decode row has the logits of its first place at each."""

    def sampled(original: Callable[..., Any], batch: Batch, shape: BatchShape, samples: int) -> Tensor | None:
        index = original(batch, shape, samples)
        if index is None or shape.places == 1:
            return index
        return index[:samples].repeat(shape.places)

    return replaced(program, "sampled_tokens", sampled)


SITES = (
    Site("what follows a wrong draft is no token", 1, believed, where=drafts),
    Site("a step counts for as many tokens as it may give", 1, one_token_a_step, where=drafts),
    Site("beside chunks, each draft has logits of its own", 1, first_places_alone, where=drafts),
)
