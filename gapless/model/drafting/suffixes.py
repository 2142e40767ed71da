"""Drafts from answers to a tenant's other requests."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.base.speculative import SpeculativeConfig
from gapless.kernels.layout import SUFFIX_LENGTHS
from gapless.kernels.seam import Kernels
from gapless.kernels.suffixes import new_suffixes
from gapless.kernels.tables import Tables
from gapless.kernels.views import Recall
from gapless.model.drafting.seam import Drafting

ANSWER_TOKENS = 256
"""Tokens of an answer that a table of suffixes has room for"""
KNOWN_TENANTS, MAX_TENANT = 4096, 2**31 - 1
"""Most numbered tenants at a time, and the last number; numbers are never reused, so no entry changes its owner"""


@dataclass(frozen=True)
class SuffixLookup:
    """Drafts the tokens that followed a row's latest tokens in its history or in answers of its tenant, by the longer
    match (after Oliaro et al., "SuffixDecoding", 2024, with a hash table of fixed size in place of suffix trees)."""

    longest: int
    """Most tokens of a match"""
    asked: Recall
    table: Tensor

    @classmethod
    def make(cls, config: SpeculativeConfig, device: torch.device) -> Drafting:
        drafts = config.num_speculative_tokens
        longest = min(SUFFIX_LENGTHS[-1], config.suffix_decoding_max_tree_depth - drafts)
        lengths = sum(length <= longest for length in SUFFIX_LENGTHS)
        entries = 1 << (config.suffix_decoding_max_cached_requests * ANSWER_TOKENS - 1).bit_length()
        factor, least = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        asked = Recall(drafts, round(1000 * factor), round(1000 * least))
        made = cls(longest, asked, new_suffixes(lengths, entries, device))
        return Drafting(made, made.learn if config.suffix_decoding_max_cached_requests else None)

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        same = kernels.look_up(rows, tables, self.asked.most, SUFFIX_LENGTHS[0], self.longest)
        kernels.recall(rows, same, tables, self.table, self.asked)

    def learn(self, kernels: Kernels, rows: Tensor, tokens: Tensor, tables: Tables) -> None:
        """Add the rows' new tokens to the table, for other rows of their tenants."""
        kernels.remember(rows, tokens, tables, self.table)


class Tenants:
    """Numbers of tenants that share answers, by the salts of their prefix caches."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def number(self, salt: str) -> int:
        """Return a tenant's number: a long absent one gets a new number. 0 once all are used."""
        number = self._numbers.pop(salt, 0)
        if not number and self._last < MAX_TENANT:
            number = self._last = self._last + 1
        self._numbers[salt] = number
        if len(self._numbers) > KNOWN_TENANTS:
            self._numbers.popitem(last=False)
        return number
