"""Settling log-probabilities: the lines of a step become those of its live requests, each position once."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from gapless.base.records import Flag, Int32s, StepLogprobs, StepPlan
from gapless.kernels.layout import NO_TOKEN
from gapless.memory.rows import NO_REQUEST, RowTable
from gapless.plan.sequence import Sequence
from gapless.step.logprobs import LogprobLines


def settle(
    lines: LogprobLines, plan: StepPlan, table: RowTable, by_row: Rows[Sequence | None]
) -> tuple[StepLogprobs, Int32s]:
    """Return what is new in the lines, and the rows that failed: some logits at a prompt position were not finite.

    A row that was preempted runs its prompt again; positions that are settled already are left out.
    """
    rows, positions = lines.rows, lines.positions
    keep = (positions >= 0) & (table.generation[rows] == lines.generations) & (table.key[rows] != NO_REQUEST)
    for chunk in plan.chunks:
        seq = by_row[chunk.row]
        if seq is not None and seq.to_score:
            keep &= (rows != chunk.row) | (positions > seq.scored)
            seq.scored = max(seq.scored, min(chunk.start + chunk.size, seq.to_score))
    failed = np.unique(rows[keep & np.isnan(lines.logprobs)])
    keep &= ~np.isin(rows, failed)
    # Indexing copies: the lines end with the outbox slot.
    columns = (lines.positions, lines.logprobs, lines.ranks, lines.top_ids, lines.top_logprobs)
    return StepLogprobs(table.key[rows[keep]], *(column[keep] for column in columns)), failed


def with_failures(rows: Int32s, tokens: Int32s, flags: Int32s, failed: Int32s) -> tuple[Int32s, Int32s, Int32s]:
    """The step's lines with these rows as failed ones, whether they sampled in it or not."""
    keep = ~np.isin(rows, failed)
    parts = ((rows, failed), (tokens, np.full_like(failed, NO_TOKEN)), (flags, np.full_like(failed, int(Flag.ERROR))))
    ended, none, errors = (np.concatenate((column[keep], new)) for column, new in parts)
    return ended, none, errors
