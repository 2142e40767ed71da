"""Drafts from a row's own history."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables


@dataclass(frozen=True)
class PromptLookup:
    """Drafts the tokens that followed the last occurrence of a row's latest tokens (Saxena, "Prompt Lookup Decoding",
    2023)."""

    most: int
    shortest: int
    longest: int

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        kernels.look_up(rows, tables, self.most, self.shortest, self.longest)
