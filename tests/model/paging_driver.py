"""A driver that pages sequences in hostile ways. Needs torch alone, so that it also runs where transformers is not."""

from __future__ import annotations

import random
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.base.config import EngineConfig
from gapless.model.decoder import Decoder
from gapless.model.loader import load_model
from gapless.model.seam import BatchShape, StepInputs

CPU = torch.device("cpu")
VOCAB = 97


def load(directory: Path, device: torch.device = CPU, **options: object) -> Decoder:
    return load_model(EngineConfig(model=str(directory), **options), device)


def prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(seed * 10_007 + length)
    return [numbers.randrange(VOCAB) for _ in range(length)]


def relative_error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return ((got - want).abs().max() / want.abs().max()).item()


class Sequence:
    """Tokens whose KV is in the cache, and the pages that hold it."""

    def __init__(self, tokens: list[int] | None = None, pages: list[int] | None = None) -> None:
        self.tokens = list(tokens or [])
        self.pages = list(pages or [])


class Driver:
    """Runs steps over a cache full of NaN, the null page too, with pages in random order and stale table entries."""

    def __init__(
        self, model: Decoder, pages: int = 160, page_size: int = 16, seed: int = 0, device: torch.device = CPU
    ) -> None:
        self.model, self.page_size, self.device = model, page_size, device
        self.cache = model.new_cache(pages, page_size, device)
        self.cache.data.fill_(torch.nan)
        self.random = random.Random(seed)
        self.free = list(range(1, pages))
        self.random.shuffle(self.free)

    def step(self, decode=(), chunks=(), inert: int = 0, slack: int = 0) -> list[Tensor]:
        """Append one token to each (sequence, token) of `decode` and many to each (sequence, tokens) of `chunks`.

        Returns the logits [tokens, vocab] of each in order. `inert` finished rows take part after the decode rows;
        `slack` widens the host's bound of decode lengths, as running ahead does.
        """
        shape, inputs = self.batch(decode, chunks, inert, slack)
        with torch.no_grad():
            hidden = self.model.forward(inputs, self.model.plan(shape), self.cache)
            logits = self.model.logits(hidden).cpu().float()
        assert hidden.shape == (shape.tokens, self.model.config.sizes.hidden)
        assert logits.dtype == torch.float32
        parts = logits.split([1] * shape.decode + [count for _, count in shape.chunks])
        return [*parts[: len(decode)], *parts[shape.decode :]]

    def batch(self, decode=(), chunks=(), inert: int = 0, slack: int = 0) -> tuple[BatchShape, StepInputs]:
        """What `step` runs; the sequences have grown when it returns."""
        rows = [self._grow(sequence, [token]) for sequence, token in decode]
        fills = [self._grow(sequence, tokens) for sequence, tokens in chunks]
        bound = max([1, *(start + 1 for _, start in rows)]) + slack
        shape = BatchShape(len(rows) + inert, tuple((s, len(q.tokens) - s) for q, s in fills), bound)
        longest = max([bound, *(len(sequence.tokens) for sequence, _ in fills)])
        width = -(-longest // self.page_size) + self.random.randrange(3)
        columns = [self._row(row, width) for row in [*rows, *[None] * inert, *fills]]
        ids, positions, slots, pages, lens = zip(*columns, strict=True)
        flat = [list(chain.from_iterable(column)) for column in (ids, positions, slots)]

        def ints(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        sizes = [1] * shape.decode + [count for _, count in shape.chunks]
        starts = ints([0, *accumulate(sizes)]) if shape.chunks else None
        table = torch.tensor(list(pages), dtype=torch.int32, device=self.device)
        rows = torch.arange(len(pages), device=self.device)
        ids, positions, slots = (ints(column) for column in flat)
        return shape, StepInputs(ids, positions, slots, ints(lens), rows, table, width, starts)

    def _grow(self, sequence: Sequence, tokens: list[int]) -> tuple[Sequence, int]:
        start = len(sequence.tokens)
        sequence.tokens += tokens
        while len(sequence.pages) * self.page_size < len(sequence.tokens):
            sequence.pages.append(self.free.pop())
        return sequence, start

    def _row(self, row: tuple[Sequence, int] | None, width: int) -> tuple[list, list, list, list, int]:
        table = [self.random.randrange(self.cache.pages) for _ in range(width)]
        if row is None:
            return [0], [10**6], [self.random.randrange(self.page_size)], table, 1
        sequence, start = row
        table[: len(sequence.pages)] = sequence.pages
        positions = list(range(start, len(sequence.tokens)))
        slots = [table[p // self.page_size] * self.page_size + p % self.page_size for p in positions]
        return sequence.tokens[start:], positions, slots, table, len(sequence.tokens)
