"""Runs logits processors inside the step: the operator's torch functions, for the rows that use them.

A processor sees a few rows at a time, and its result is kept only for rows that use it. It runs after biases and
penalties and before masks, so that a form of output holds whatever it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import ConfigError
from gapless.base.processors import MAX_ARGUMENTS
from gapless.kernels import layout as L
from gapless.kernels.tables import Adjustments, Tables

CALL_ROWS = (1, 4, 16)
"""Rows of one call; the last bounds the memory of a processor."""


class ProcessorTables:
    """Device tables of the R rows of a call. A tensor is made at its first use."""

    def __init__(self, tables: Tables, adjustments: Adjustments, rows: Tensor, number: int) -> None:
        """`rows` are int64 [R], and `number` is the processor's."""
        self._tables = tables
        self._adjustments = adjustments
        self._rows = rows
        self._slots = slots_of(rows, tables)
        self._number = number

    @property
    def arguments(self) -> Tensor:
        """Return the arguments of this processor, float32 [R, 8]; 0 for missing ones."""
        first = L.ARGUMENTS + self._number * MAX_ARGUMENTS
        return self._wishes(first, MAX_ARGUMENTS).view(torch.float32)

    @property
    def lengths(self) -> Tensor:
        """Return the tokens of prompt and output, int64 [R] and at least 1."""
        # The null row has none, and a processor is captured with it.
        return self._tables.state[:, L.LENGTH].index_select(0, self._rows).long().clamp(min=1)

    @property
    def prompt_lengths(self) -> Tensor:
        """Return the tokens of the prompt, int64 [R]."""
        return self._wishes(L.OUTPUT, 1)[:, 0].long()

    @property
    def history(self) -> Tensor:
        """Return the tokens of prompt and output, int64 [R, longest]; beyond the first `lengths` they are undefined."""
        return self._tables.history.index_select(0, self._rows).long()

    @property
    def counts(self) -> Tensor:
        """Return the count of each token in the output, int32 [R, vocabulary]."""
        return self._adjustments.counts.index_select(0, self._slots) & (L.IN_PROMPT - 1)

    @property
    def in_prompt(self) -> Tensor:
        """Return whether the prompt has each token, bool [R, vocabulary]."""
        return self._adjustments.counts.index_select(0, self._slots) >= L.IN_PROMPT

    def _wishes(self, first: int, count: int) -> Tensor:
        return self._adjustments.wishes[:, first : first + count].index_select(0, self._slots)


LogitsFunction = Callable[[Tensor, ProcessorTables], Tensor]
"""(logits float32 [R, vocabulary], tables) -> logits of the same shape. It may write to its arguments."""


class Processor(NamedTuple):
    name: str
    function: LogitsFunction

    def __call__(self, logits: Tensor, tables: ProcessorTables) -> Tensor:
        """Raises ConfigError if the function returns anything but logits like its argument."""
        shape = logits.shape, logits.dtype, logits.device
        made = self.function(logits, tables)
        if not isinstance(made, Tensor):
            raise ConfigError(f"logits_processors: {self.name} must return a tensor, not {type(made).__name__}")
        if (found := (made.shape, made.dtype, made.device)) != shape:
            raise ConfigError(f"logits_processors: {self.name} must return {_shown(shape)}, not {_shown(found)}")
        return made


def _shown(what: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = what
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def slots_of(rows: Tensor, tables: Tables) -> Tensor:
    """Return the slots of these rows, both int64 [R]."""
    return tables.params[:, L.ADJUST_SLOT].index_select(0, rows).long()


def process(
    processors: Sequence[Processor], numbers: Sequence[int], rows: Tensor, tables: Tables, adjustments: Adjustments
) -> None:
    """Let the processors of these numbers change the adjusted logits of the `rows` with them, int32 [F].

    A repeated row is padding: both write the same.
    """
    logits, wishes = adjustments.adjusted[0], adjustments.wishes[:, L.PROCESSORS]  # a row with processors has no drafts
    for number in numbers:
        for some in torch.split(rows.long(), CALL_ROWS[-1]):
            slots = slots_of(some, tables)
            asked = (wishes.index_select(0, slots) >> number) & 1
            given = ProcessorTables(tables, adjustments, some, number)
            made = processors[number](logits.index_select(0, slots), given)
            kept = torch.where(asked[:, None] > 0, made, logits.index_select(0, slots))
            logits.index_copy_(0, slots, kept)
