"""Interfaces of drafters. `Head`s are part of the model; others draft from the tables alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.seam import KVCache, StepInputs

Learner = Callable[[Kernels, Tensor, Tensor, Tables], None]
"""(kernels, rows int32 [N], tokens int32 [N, W], tables), run with the tokens after `finish` of every step"""
Drafter = Callable[[Kernels, Tensor, Tables], None]
"""(kernels, rows int32 [N], tables), run at the end of a step: writes DRAFTED, and drafts after the history of each row
that may have them."""


class Drafting(NamedTuple):
    """A drafter of an engine, and its update after every step, if it has one."""

    drafter: Drafter
    learner: Learner | None = None


class Head(Protocol):
    """A drafter that is part of the model: it drafts at the beginning of the step that verifies."""

    def beside(self, model: Any) -> Self:
        """Return this head for another form of its model."""
        ...

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        """Write DRAFTED of rows int32 [N], before a step's inputs are made: up to `drafts` for rows that may have
        any."""
        ...

    def forward(self, inputs: StepInputs, plan: Any, tables: Tables, cache: KVCache) -> Tensor:
        """Write the drafts to the history and to the inputs of places after the first; then run `Model.forward`."""
        ...
