"""Settling a step: the lines and log-probabilities of live requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gapless.base.records import NO_TOKEN, Chunk, Flag, Int32s, Int64s, StepLogprobs, StepPlan
from gapless.memory.rows import NO_REQUEST, RowTable
from gapless.step.logprobs import LogprobLines

_ERROR = int(Flag.ERROR)


class Lines(NamedTuple):
    """The settled tokens of a step, a line for each row."""

    rows: Int64s
    tokens: Int32s
    """[N] or [N, W], negative after the last token of a row"""
    flags: Int32s


def of_decode_rows(plan: StepPlan, rows: Int64s, tokens: Int32s) -> tuple[Int64s, Int32s]:
    """Return a step's lines without the rows whose prompts end in it: these could not have drafts."""
    decoded = ~np.isin(rows, [chunk.row for chunk in plan.chunks])
    return rows[decoded], tokens[decoded]


def settle(
    lines: LogprobLines, plan: StepPlan, table: RowTable, score: Callable[[Chunk], int]
) -> tuple[StepLogprobs, Int64s]:
    """Return the new log-probabilities, and the failed rows: some logits at a prompt position were not finite.

    A preempted row runs its prompt again: the leading positions already settled, whose number `score` returns, are left
    out.
    """
    rows, positions = lines.rows, lines.positions
    keep = (positions >= 0) & (table.generation[rows] == lines.generations) & (table.key[rows] != NO_REQUEST)
    for chunk in plan.chunks:
        if settled := score(chunk):
            keep &= (rows != chunk.row) | (positions > settled)
    failed = np.unique(rows[keep & np.isnan(lines.logprobs)])
    keep &= ~np.isin(rows, failed)
    # Indexing copies: the lines end with the outbox slot.
    columns = (lines.positions, lines.logprobs, lines.ranks, lines.top_ids, lines.top_logprobs)
    return StepLogprobs(table.key[rows[keep]], *(column[keep] for column in columns)), failed


def with_failures(lines: Lines, failed: Int64s) -> Lines:
    """Return a step's lines with these rows marked as failed, whether they sampled in it or not."""
    keep = ~np.isin(lines.rows, failed)
    rows, tokens, flags = (column[keep] for column in lines)
    none = np.full((len(failed), *tokens.shape[1:]), NO_TOKEN, np.int32)
    errors = np.full(len(failed), _ERROR, np.int32)
    return Lines(np.concatenate((rows, failed)), np.concatenate((tokens, none)), np.concatenate((flags, errors)))
