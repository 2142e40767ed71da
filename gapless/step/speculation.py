"""Speculation: who drafts tokens on the device, and which steps run drafts.

A step with drafts gives a row as many tokens as there were right ones, and one more. It costs more than a step without,
so the host counts what rows got from such steps, and goes without drafts where they do not pay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from gapless.base.records import Int32s, Int64s, Request
from gapless.base.speculative import MAX_DRAFTS
from gapless.kernels.layout import NO_TOKEN, REJECTED, RIGHT
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.seam import KVCache, StepInputs

HOPE = 0.5
"""How often a new row is expected to have drafts, and these to be right"""
HEAD_HOPE = 0.8
"""How often the first drafts of a head are expected to be right; it always has some"""
USUAL = 0.05
"""What the latest step counts for in what is expected of a head for a new row"""
RETRY = 64
"""Decisions of a head's steps, of which one is the other way round"""
LEARNS = 0.2
"""What the latest step counts for in what is expected of a row"""
COSTS = 1.2
"""What a step with drafts takes, in steps without, before both were measured"""
FORGETS = 1.01
"""How fast the least time of a step grows until a step confirms it: some are held up by other things"""
PAYS = 1.05
"""What a step with drafts must give beyond its costs"""

LOOKS = 4
"""Steps without drafts between two looks at what they would have given, and steps of any kind between two decisions"""

Drafter = Callable[[Kernels, Tensor, Tables], None]
"""(kernels, rows int32 [N], tables), at the end of a step: writes drafts after the history of each row that may have
them, and DRAFTED."""


class Head(Protocol):
    """A drafter that is part of the model: it drafts at the beginning of the step that verifies."""

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        """Write DRAFTED of rows int32 [N], before a step's inputs are made: up to `drafts` where they may have any."""
        ...

    def forward(self, inputs: StepInputs, plan: Any, tables: Tables, cache: KVCache) -> Tensor:
        """Write the drafts to the inputs of places after the first and to the history; then as `Model.forward`."""
        ...


@dataclass(frozen=True)
class PromptLookup:
    """Drafts what followed when a row's history last ended like now (Saxena, "Prompt Lookup Decoding", 2023)."""

    most: int
    shortest: int
    longest: int

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        kernels.look_up(rows, tables, self.most, (self.shortest, self.longest))


class Speculation(NamedTuple):
    """How an engine speculates."""

    drafts: int
    """Drafts of a row in a step"""
    drafter: Drafter | None
    rows: int
    """Rows of a step with drafts, at most"""
    head: Head | None = None
    """What drafts instead of a drafter"""

    @property
    def places(self) -> int:
        """Tokens of a row that a step with drafts runs, and the most that it gives."""
        return self.drafts + 1


def most_drafts(request: Request) -> int:
    """Return how many drafts a request may have in a step: none where a matcher or processor sees each token."""
    free = request.matcher is None and not request.processors
    return MAX_DRAFTS if request.params.speculate and free else 0


class Verify(NamedTuple):
    """What a step does about drafts."""

    places: int
    """Tokens of each row: 1 without drafts"""
    drafts: bool
    """Whether rows get drafts for the next step"""


PLAIN = Verify(1, drafts=False)


class DraftCounts:
    """Counts what became of drafts."""

    def __init__(self, drafts: int) -> None:
        self.drafts = 0
        """Rows that ran drafts, each step for itself"""
        self.draft_tokens = 0
        self.accepted = np.zeros(drafts, np.int64)
        """Draft tokens that were right, by their place"""


class Gate:
    """Decides which decode steps run drafts. Drafters draft in the others too, to see what that would give."""

    def __init__(self, speculation: Speculation, rows: int) -> None:
        self._most = speculation.rows
        self._verifies = Verify(speculation.places, drafts=True)
        self._looks = speculation.head is None
        self._otherwise = Verify(1, drafts=True) if self._looks else PLAIN
        """What steps do where drafts do not pay"""
        self._hopes = (HOPE, HOPE) if self._looks else (1.0, HEAD_HOPE)
        """How often a new row is expected to have drafts, and these to be right"""
        self._decisions = 0
        self._may = np.zeros(rows + 1, bool)
        self.there, self.right = np.zeros((2, rows + 1))
        """How often each row has drafts, and how often one of them is right"""
        self._places = np.arange(1, speculation.places)
        self._rows: tuple[int, ...] = ()
        self._index: Int64s = np.empty(0, np.int64)
        self._steps, self._now = 0, PLAIN
        self._ns: dict[tuple[int, bool], float] = {}
        """Least time of a step lately, by the bits of its number of rows, and whether it has drafts"""
        self.counts = DraftCounts(speculation.drafts)

    def admit(self, row: int, request: Request) -> None:
        """The row begins to serve a request."""
        self._may[row] = most_drafts(request) > 0
        self.there[row], self.right[row] = self._hopes if self._may[row] else (0.0, 0.0)

    def decide(self, decode: tuple[int, ...]) -> Verify:
        """Return what the next step of these rows does."""
        if not 0 < len(decode) <= self._most:
            return PLAIN
        if decode is not self._rows:
            self._rows, self._index, self._steps = decode, np.array(decode, np.int64), 0
        self._steps += 1
        if self._steps % LOOKS != 1:
            return self._now
        right = self.right[self._index, None] ** self._places
        gain = float((right.sum(1) * self.there[self._index]).mean())
        pays = 1 + gain >= PAYS * self._costs(len(decode))
        verifies = pays if self._looks else self._tries(pays, len(decode))
        self._now = self._verifies if verifies else self._otherwise
        return self._now

    def _tries(self, pays: bool, rows: int) -> bool:
        """Return whether a head drafts. Its costs and gains are known from steps with drafts and without alone."""
        if (rows.bit_length(), False) not in self._ns:
            return False
        self._decisions += 1
        return pays != (self._decisions % RETRY == 0)

    def learn(self, rows: int, places: int, ns: int) -> None:
        """A step of `rows` decode rows took the device `ns`."""
        key = rows.bit_length(), places > 1
        self._ns[key] = min(ns, FORGETS * self._ns.get(key, ns))

    def _costs(self, rows: int) -> float:
        with_drafts, without = (self._ns.get((rows.bit_length(), drafts)) for drafts in (True, False))
        return max(1.0, with_drafts / without) if with_drafts and without else COSTS

    def observe(self, rows: Int32s, tokens: Int32s, places: int) -> None:
        """A step gave these rows `tokens` [N, W], as `step.outbox` has them."""
        if places == 1 and (self._steps % LOOKS or not self._looks):
            return
        there = tokens[:, 1] != NO_TOKEN
        self.there[rows] += LEARNS * (there - self.there[rows])
        rows, tokens = rows[there], tokens[there]
        if places > 1:
            given = tokens[:, 1:] >= 0
            self.counts.drafts += len(rows)
            self.counts.draft_tokens += int(np.count_nonzero(tokens[:, 1:] != NO_TOKEN))
            self.counts.accepted += given.sum(0)
            # As many were right as were taken, and one more was looked at unless that were all.
            right = given.sum(1)
            share = right / np.maximum(1, right + (tokens[:, 1:] == REJECTED).any(1))
        else:
            share = tokens[:, 1] == RIGHT
        self.right[rows] += LEARNS * (share - self.right[rows])
        if not self._looks and len(share):
            usual = self._hopes[1]
            self._hopes = 1.0, usual + USUAL * (float(share.mean()) - usual)
