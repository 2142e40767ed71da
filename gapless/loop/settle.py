"""Settling the lines of a step: one entry a token."""

from __future__ import annotations

import numpy as np

from gapless.base.records import Flag, Int32s, StepPlan


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
