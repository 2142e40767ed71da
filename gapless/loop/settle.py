"""Settling a step: its lines become one entry a token, its log-probabilities those of live requests."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np

from gapless.base.records import Flag, Int32s, Int64s, StepLogprobs, StepPlan
from gapless.kernels.layout import NO_TOKEN
from gapless.memory.rows import NO_REQUEST, RowTable
from gapless.plan.sequence import Sequence
from gapless.step.logprobs import LogprobLines

_ERROR, _HELD = int(Flag.ERROR), int(Flag.HELD)


class Entries(NamedTuple):
    """What a step settles, one entry per token."""

    rows: Int32s
    tokens: Int32s
    flags: Int32s
    places: Int64s | None = None
    """The place of each token among those of its row; None where each row has one, or one row has all"""


def one_by_one(rows: Int32s, tokens: Int32s, flags: Int32s, some_flag: bool) -> Entries:
    """Return lines of rows [N], tokens [N, W] negative where there is none, and flags [N], as one entry per token.

    The entries of a row are adjacent, and all but the last one are live. A row that failed has an entry without a
    token, a row that was held has none. `some_flag` is whether some flag is not LIVE.
    """
    if tokens.shape[1] == 1:
        tokens, going = tokens[:, 0], flags != _HELD if some_flag else None
        if going is None or np.count_nonzero(going) == len(going):
            return Entries(rows, tokens, flags.copy())
        return Entries(rows[going], tokens[going], flags[going])
    if len(rows) == 1 and not some_flag:  # plain numbers take less than arrays
        count = sum([token >= 0 for token in tokens[0].tolist()])
        return Entries(rows.repeat(count), tokens[0, :count], flags.repeat(count))
    taken = tokens >= 0
    if some_flag:
        taken[:, 0] |= flags == _ERROR
    index, places = taken.nonzero()
    found = Entries(rows.take(index), tokens[taken], np.zeros(len(index), np.int32), places)
    if some_flag:
        last = np.ones(len(index), bool)
        np.not_equal(index[1:], index[:-1], out=last[:-1])
        found.flags[last] = flags.take(index[last])
    return found


def of_decode_rows(plan: StepPlan, rows: Int32s, tokens: Int32s) -> tuple[Int32s, Int32s]:
    """Return the lines of a step without those of rows whose prompts end in it: these could not have drafts."""
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


def with_failures(entries: Entries, failed: Int32s) -> Entries:
    """Return the entries of a step with these rows as failed ones, whether they sampled in it or not."""
    keep, count = ~np.isin(entries.rows, failed), len(failed)
    tokens = np.concatenate((entries.tokens[keep], np.full(count, NO_TOKEN, np.int32)))
    flags = np.concatenate((entries.flags[keep], np.full(count, _ERROR, np.int32)))
    places = None if entries.places is None else np.append(entries.places[keep], np.zeros(count, np.int64))
    return Entries(np.concatenate((entries.rows[keep], failed)), tokens, flags, places)
