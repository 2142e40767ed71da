"""Settling a step: its lines become one entry a token, its log-probabilities those of live requests."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from gapless.base.records import Flag, Int32s, StepLogprobs, StepPlan
from gapless.kernels.layout import NO_TOKEN
from gapless.memory.rows import NO_REQUEST, RowTable
from gapless.plan.sequence import Sequence
from gapless.step.logprobs import LogprobLines


def one_by_one(rows: Int32s, tokens: Int32s, flags: Int32s) -> tuple[Int32s, Int32s, Int32s]:
    """Return lines of rows [N], tokens [N, W] negative where there is none, and flags [N], as one entry per token.

    The entries of a row are adjacent, and all but the last one are live. A row that failed has an entry without a
    token, a row that was held has none.
    """
    held, live = int(Flag.HELD), int(Flag.LIVE)
    if tokens.shape[1] == 1:
        tokens, going = tokens[:, 0], flags != held
        some_held = np.count_nonzero(going) < len(going)
        return (rows[going], tokens[going], flags[going]) if some_held else (rows, tokens, flags)
    taken = tokens >= 0
    if not np.count_nonzero(flags):  # all are live
        if len(rows) == 1:
            count = int(np.count_nonzero(taken))
            return rows.repeat(count), tokens[0, :count], flags.repeat(count)
        index = taken.nonzero()[0]
        return rows.take(index), tokens[taken], np.zeros(len(index), np.int32)
    taken[:, 0] |= flags == int(Flag.ERROR)
    index = taken.nonzero()[0]
    last = np.ones(len(index), bool)
    np.not_equal(index[1:], index[:-1], out=last[:-1])
    return rows.take(index), tokens[taken], np.where(last, flags.take(index), live)


def of_decode_rows(plan: StepPlan, rows: Int32s, tokens: Int32s) -> tuple[Int32s, Int32s]:
    """Return the lines of a step without those of rows whose prompts end in it: these could not have drafts."""
    if not plan.chunks:
        return rows, tokens
    decoded = ~np.isin(rows, [chunk.row for chunk in plan.chunks])
    return rows[decoded], tokens[decoded]


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
