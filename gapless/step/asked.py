"""Which rows ask for log-probabilities, from their admissions on. A step in which none does pays nothing."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gapless.base.records import Int32s, Request, StepPlan
from gapless.memory.rows import RowTable
from gapless.step.logprobs import PROMPT_WORDS, WIDTHS, LogprobShape


class Asked(NamedTuple):
    """What one step scores."""

    shape: LogprobShape
    samples: list[int]
    """Indices of sampled rows in the batch."""
    prompt: list[Int32s]
    """Of each chunk that asks, int32 [n, PROMPT_WORDS]."""

    def write(self, words: Int32s) -> None:
        """Fill the end of a packet's words: the samples, then the prompt positions."""
        end = len(words) - PROMPT_WORDS * self.shape.prompt
        words[end - self.shape.samples : end] = self.samples
        if self.prompt:
            np.concatenate(self.prompt, out=words[end:].reshape(-1, PROMPT_WORDS))


class Asking:
    """The settings of the rows that ask. A row that was left stays until somebody else is admitted to it."""

    def __init__(self, rows: RowTable) -> None:
        self._table = rows
        self._sampled: dict[int, int] = {}
        """Row -> most likely tokens wanted beside a sampled one."""
        self._prompt: dict[int, tuple[int, int]] = {}
        """Row -> most likely tokens wanted beside a prompt token, and tokens of the prompt."""
        self._decode: tuple[int, ...] = ()
        self._samples: list[int] = []

    def admit(self, row: int, request: Request) -> None:
        """The row serves this request from now on."""
        self._sampled.pop(row, None)
        self._prompt.pop(row, None)
        if request.params.logprobs is not None:
            self._sampled[row] = request.params.logprobs
        if request.params.prompt_logprobs is not None:
            self._prompt[row] = request.params.prompt_logprobs, len(request.tokens)

    def of(self, plan: StepPlan) -> Asked | None:
        """What the rows of this plan ask for; None when it is nothing."""
        if not self._sampled and not self._prompt:
            return None
        if plan.decode is not self._decode:
            self._decode = plan.decode
            self._samples = [index for index, row in enumerate(plan.decode) if row in self._sampled]
        first = len(plan.decode)
        fresh = [i for i, chunk in enumerate(plan.chunks, first) if chunk.last and chunk.row in self._sampled]
        samples = self._samples + fresh
        prompt, widest = self._places(plan) if self._prompt and plan.chunks else ([], 0)
        if not samples and not prompt:
            return None
        rows = (plan.decode[i] if i < first else plan.chunks[i - first].row for i in samples)
        widest = max(widest, *(self._sampled[row] for row in rows), 0)
        width = next(width for width in WIDTHS if width >= widest)
        return Asked(LogprobShape(len(samples), sum(map(len, prompt)), width), samples, prompt)

    def _places(self, plan: StepPlan) -> tuple[list[Int32s], int]:
        """The prompt positions that run in this step and have a prompt token behind them."""
        found, widest, at = [], 0, len(plan.decode)
        for index, chunk in enumerate(plan.chunks, len(plan.decode)):
            wanted, length = self._prompt.get(chunk.row, (0, 0))
            count = min(chunk.size, length - 1 - chunk.start)
            if count > 0:
                places = np.empty((count, PROMPT_WORDS), np.int32)
                places[:, 0] = np.arange(at, at + count)
                places[:, 1] = index
                places[:, 2] = self._table.tokens[chunk.row, chunk.start + 1 : chunk.start + 1 + count]
                found.append(places)
                widest = max(widest, wanted)
            at += chunk.size
        return found, widest
