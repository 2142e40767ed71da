"""The checksum model: its next token is an integer hash of every KV entry that it may read.

A stale, torn, foreign or missing entry changes the output for certain, so equal tokens mean equal memory traffic.
It proves the engine around it; `continue_prompt` computes the same tokens directly, without any of that engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from gapless.base.records import Request
from gapless.base.share import Share
from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.memory.groups import PageGroup
from gapless.model.seam import BatchShape, KVCache, StepInputs

PRIME = 2**31 - 1


class ChecksumModel:
    """Implements `Model` over integers. One layer; an entry is one int64.

    Each rank of a group keeps a part of every entry, in memory of its own, and computes some columns of the logits.
    """

    bounded = True
    group: Group = ONE_RANK
    dtype = torch.float32

    def __init__(self, vocab_size: int = 97, max_model_len: int = 256) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len

    def groups(self) -> tuple[PageGroup, ...]:
        return (PageGroup(),)

    def page_bytes(self, page_size: int) -> int:
        return 2 * page_size * 8

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        return KVCache.zeros(pages, 1, page_size, 1, 1, dtype=torch.int64, device=device)

    def plan(self, shape: BatchShape) -> tuple[int, ...]:
        """Query tokens of each row."""
        return (1,) * shape.decode + tuple(count for _, count in shape.chunks)

    def forward(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> Tensor:
        """int64 [T, 1]: the hash of all entries up to each token's own."""
        size = cache.page_size
        entries = cache.data[:, 0, 0, :, 0, 0]  # [pages, page_size]
        page, offset = inputs.slots // size, inputs.slots % size
        entries[page, offset] = part(self.entries(inputs), self.group.share)
        device = inputs.ids.device
        owner = owners(plan, device)
        readable = entries[pages_read(inputs, size)].flatten(1)[owner]  # [T, positions]
        position = torch.arange(readable.shape[1], device=device)
        terms = readable * weight(position) % PRIME
        fold = torch.where(self.reads(position, inputs.positions[:, None]), terms, 0).sum(1, keepdim=True) % PRIME
        return self.group.add(fold) % PRIME

    def reads(self, position: Tensor, own: Tensor) -> Tensor:
        """bool: whether the token at `own` reads the entry at `position`."""
        return position <= own

    def entries(self, inputs: StepInputs) -> Tensor:
        """int64 [T]: the KV entry of each token."""
        return entry(inputs.ids, inputs.positions)

    def scores(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab]: 1 at the next token."""
        token = next_token(hidden, self.vocab_size)
        return torch.zeros(hidden.shape[0], self.vocab_size, device=hidden.device).scatter_(1, token, 1.0)

    def logits(self, hidden: Tensor) -> Tensor:
        scores, (rank, world) = self.scores(hidden), self.group.share
        if world == 1:
            return scores
        first, last = rank * self.vocab_size // world, (rank + 1) * self.vocab_size // world
        return self.group.gather(scores[:, first:last].contiguous(), scores[:, : 0 if rank else None].clone())

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        out.copy_(self.logits(hidden))

    def first_layers(self) -> Self:
        return self


def part(entries: Tensor, share: Share) -> Tensor:
    """Return a rank's part of entries. The parts of all ranks add up to the entries, modulo PRIME."""
    others = [(entries * 16_807 * rank + 7_919) % PRIME for rank in range(1, share.world)]
    return others[share.rank - 1] if share.rank else (entries - sum(others)) % PRIME if others else entries


def pages_read(inputs: StepInputs, page_size: int) -> Tensor:
    """int64 [B, columns]: each row's pages, and the null page after the pages that it reads.

    The table's columns there may name pages of others that a transfer is writing.
    """
    pages = inputs.pages
    first = torch.arange(0, pages.shape[1] * page_size, page_size, device=pages.device)
    return torch.where(first < inputs.kv_lens[:, None], pages, 0)


def owners(plan: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [T]: the row of the batch that each token belongs to."""
    if len(plan) == sum(plan):
        return torch.arange(len(plan), device=device)
    return torch.cat([torch.full((count,), row, device=device) for row, count in enumerate(plan)])


def entry(token: Tensor, position: Tensor) -> Tensor:
    """The KV entry of a token."""
    return (token * 7_368_787 + position * 104_729 + 15_485_863) % PRIME


def weight(position: Tensor) -> Tensor:
    """A factor that makes the order of entries matter."""
    return (position * 48_271 + 1_299_709) % PRIME


def next_token(fold: Tensor, vocab_size: int) -> Tensor:
    return (fold * 16_807 % PRIME) % vocab_size


def continue_prompt(prompt: Sequence[int], count: int, vocab_size: int, shift: int = 0) -> list[int]:
    """The next `count` tokens after `prompt`, computed directly. `shift` is added to each entry."""
    tokens, fold = list(prompt), 0
    for position in range(len(prompt) + count):
        if position == len(tokens):
            tokens.append(fold * 16_807 % PRIME % vocab_size)
        value = (tokens[position] * 7_368_787 + position * 104_729 + 15_485_863 + shift) % PRIME
        fold = (fold + value * ((position * 48_271 + 1_299_709) % PRIME)) % PRIME
    return tokens[len(prompt) :]


def answer(request: Request, vocab_size: int) -> list[int]:
    """All tokens that a greedy request gets when nothing disturbs it, up to and with the first stop id."""
    prompt = request.tokens.tolist()
    tokens = continue_prompt(prompt, request.max_len - len(prompt), vocab_size)
    ends = (index + 1 for index, token in enumerate(tokens) if token in request.stop_ids)
    return tokens[: next(ends, len(tokens))]
