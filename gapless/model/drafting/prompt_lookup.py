"""Drafts from a row's own history."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.base.speculative import SpeculativeConfig
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.drafting.seam import Drafting


@dataclass(frozen=True)
class PromptLookup:
    """Drafts the tokens that followed the last occurrence of a row's latest tokens (Saxena, "Prompt Lookup Decoding",
    2023)."""

    most: int
    shortest: int
    longest: int

    @classmethod
    def make(cls, config: SpeculativeConfig, device: torch.device) -> Drafting:
        return Drafting(cls(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max))

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        kernels.look_up(rows, tables, self.most, self.shortest, self.longest)
