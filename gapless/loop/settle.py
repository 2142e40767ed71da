"""Settling a step: the lines and log-probabilities of live requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gapless.base.part import Hooks
from gapless.base.records import NO_TOKEN, Chunk, Flag, Int32s, Int64s, StepLogprobs, StepPlan, StepTokens
from gapless.loop.steplog import StepLog
from gapless.memory.rows import NO_REQUEST, RowTable
from gapless.plan.planner import Planner
from gapless.step.launcher import Flight, Launcher
from gapless.step.logprobs import LogprobLines
from gapless.step.packet import step_word

# Plain integers: reading a member of an enumeration costs as much as an array operation.
_LIVE, _ERROR, _INERT, _HELD = int(Flag.LIVE), int(Flag.ERROR), int(Flag.INERT), int(Flag.HELD)
NONE_ENDED: list[tuple[int, bool]] = []


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


class Settler:
    """Brings the tokens of observed steps to the row table and the planner. Lines of requests that have left are
    dropped."""

    def __init__(self, launcher: Launcher, planner: Planner, rows: RowTable, hooks: Hooks, log: StepLog) -> None:
        self._launcher, self._planner, self._rows, self._hooks, self._log = launcher, planner, rows, hooks, log
        self._marked = launcher.gate is not None
        """Whether lines have marks for the gate after a step's places"""

    def settle(self, flight: Flight) -> tuple[StepTokens, list[tuple[int, bool]]]:
        """Return the tokens of an observed step, and the rows that ended, each with whether it failed."""
        plan, table = flight.plan, self._rows
        every, some_flag = self._lines(flight)
        sampled, tokens, flags = every
        one = tokens.shape[1] == 1 or (self._marked and flight.batch.places == 1)
        lines = Lines(sampled, tokens[:, 0] if one else tokens, flags)
        if some_flag and len(held := sampled[flags == _HELD]):
            self._log.held(len(held), in_vain=len(held) == len(flags) and not plan.chunks)
            for part in self._hooks.held:
                part.held(held)
            lines = Lines(*(column[flags != _HELD] for column in lines))
        logprobs = None
        if flight.decision.logprobs is not None:
            logprobs, failed = settle(self._launcher.read_logprobs(flight), plan, table, self._planner.score)
            if len(failed):
                some_flag, lines = True, with_failures(lines, failed)
        rows, tokens, flags = lines
        # The table drops a key when its request ends; a record of decode rows has a copy.
        keys = flight.decoded.keys if rows is flight.decoded.rows else table.key.take(rows)
        settled = StepTokens(plan.step, keys, tokens, flags, logprobs)
        for part in self._hooks.settled:
            part.settled(flight, every, settled)
        table.append(*((rows[flags != _ERROR], tokens[flags != _ERROR]) if some_flag else (rows, tokens)))
        self._planner.commit(plan, sampled)
        return settled, _ended(rows, flags) if some_flag else NONE_ENDED

    def _lines(self, flight: Flight) -> tuple[Lines, bool]:
        """Return a step's lines, tokens [N, W], of requests still on their rows, and whether some flag is not LIVE."""
        out = self._launcher.read(flight)
        plan, table = flight.plan, self._rows
        assert out.step == step_word(plan.step), f"outbox of step {out.step} read as step {plan.step}"
        # Kept tokens must be copied: the views end with the outbox slot. A copy is also faster to work with.
        tokens, flags = out.tokens.copy(), out.flags
        # `take` and `count_nonzero` take a third of the time of indexing and `any` for few rows.
        some_flag = bool(np.count_nonzero(flags))
        if not some_flag and self._planner.repeats(plan) and out.generations.tobytes() == flight.decoded.generations:
            # While the decode set is unchanged, no row has left; the lines are in its order.
            return Lines(flight.decoded.rows, tokens, flags.copy()), False
        rows = out.rows.astype(np.int64)
        same = table.generation.take(rows) == out.generations
        self._log.counters.dropped_identity += len(rows) - int(np.count_nonzero(same))
        live = same & (table.key.take(rows) != NO_REQUEST) & (flags != _INERT)
        return Lines(rows[live], tokens[live], flags[live]), some_flag


def _ended(rows: Int64s, flags: Int32s) -> list[tuple[int, bool]]:
    ended = flags != _LIVE
    return [*zip(rows[ended].tolist(), (flags[ended] == _ERROR).tolist(), strict=True)]
