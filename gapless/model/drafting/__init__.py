"""Drafters, one file each: on the device they write tokens that a step may verify."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gapless.base.speculative import SpeculativeConfig
from gapless.model.drafting import forms
from gapless.model.drafting.prompt_lookup import PromptLookup
from gapless.model.drafting.seam import Drafting
from gapless.model.drafting.suffixes import SuffixLookup

DRAFTERS: dict[str, Callable[[SpeculativeConfig, torch.device], Drafting]] = {
    "ngram": PromptLookup.make,
    "suffix": SuffixLookup.make,
    "grammar": forms.make,
}
"""Drafters that need no model, by method; `load_drafter` makes the others."""
