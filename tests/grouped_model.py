"""A checksum model with two page groups: its next token is a hash of all entries in one and of the last few in the
other. `continue_grouped` computes the same tokens directly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gapless.memory.groups import PageGroup, WindowRule
from gapless.model.seam import KVCache, StepInputs
from gapless.testing.checksum import ChecksumModel, entry, owners, pages_read, part, weight

PRIME = 2**31 - 1
WINDOW = 6
"""Tokens that a position reads in the second group, its own included."""


class GroupedModel(ChecksumModel):
    """Implements `Model` over integers. Each group has one layer; an entry is one int64, another in each group."""

    def groups(self) -> tuple[PageGroup, ...]:
        return PageGroup("full"), PageGroup("window", WindowRule(WINDOW))

    def page_bytes(self, page_size: int) -> int:
        return 2 * super().page_bytes(page_size)

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        made = [super(GroupedModel, self).new_cache(pages, page_size, device).data for _ in self.groups()]
        return KVCache(made[0], tuple(made[1:]))

    def forward(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> Tensor:
        """int64 [T, 1]: the folds of both groups together."""
        full = self._fold(inputs, plan, cache, 1, self.max_model_len)
        window = self._fold(inputs.group(1), plan, cache.group(1), 3, WINDOW)
        return self.group.add((full + 7 * window) % PRIME) % PRIME

    def _fold(
        self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache, factor: int, reach: int
    ) -> Tensor:  # fmt: skip
        """int64 [T, 1]: the hash of the last `reach` entries up to each token's own. Others may hold anything."""
        size, entries = cache.page_size, cache.data[:, 0, 0, :, 0, 0]  # [pages, page_size]
        whole = factor * entry(inputs.ids, inputs.positions)
        entries[inputs.slots // size, inputs.slots % size] = part(whole, self.group.share)
        readable = entries[pages_read(inputs, size)].flatten(1)[owners(plan, inputs.ids.device)]  # [T, positions]
        position, own = torch.arange(readable.shape[1], device=inputs.ids.device), inputs.positions[:, None]
        terms = readable % PRIME * weight(position) % PRIME
        return torch.where((position <= own) & (position > own - reach), terms, 0).sum(1, keepdim=True) % PRIME


def continue_grouped(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The next `count` tokens after `prompt`, computed directly."""
    tokens: list[int] = list(prompt)
    for last in range(len(prompt) - 1, len(prompt) + count - 1):
        folds = []
        for factor, first in ((1, 0), (3, max(0, last - WINDOW + 1))):
            fold = 0
            for position in range(first, last + 1):
                value = factor * ((tokens[position] * 7_368_787 + position * 104_729 + 15_485_863) % PRIME) % PRIME
                fold += value * ((position * 48_271 + 1_299_709) % PRIME)
            folds.append(fold % PRIME)
        tokens.append((folds[0] + 7 * folds[1]) % PRIME * 16_807 % PRIME % vocab_size)
    return tokens[len(prompt) :]
