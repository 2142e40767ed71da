"""Speculation: who drafts tokens on the device, and which steps run drafts.

A step with drafts gives a row as many tokens as there were right ones, and one more. It costs more than a step without,
so the host counts what rows got from such steps, and goes without drafts where they do not pay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.base.records import Int32s, Int64s, Request
from gapless.base.speculative import MAX_DRAFTS, SpeculativeConfig
from gapless.kernels.layout import DRAFTED, LENGTH, NO_TOKEN, REJECTED, RIGHT, SUFFIX_LENGTHS
from gapless.kernels.seam import Kernels
from gapless.kernels.suffixes import new_suffixes
from gapless.kernels.tables import Tables
from gapless.kernels.views import Recall
from gapless.model.seam import BatchShape, KVCache, StepInputs

HOPE = 0.5
"""How often a new row is expected to have drafts, and these to be right"""
HEAD_HOPE = 0.8
"""How often the first drafts of a head are expected to be right; it always has some"""
USUAL = 0.05
"""What the latest step counts for in what is expected of a head for a new row"""
RETRY, FIRST = 64, 8
"""Decisions for steps of about as many rows, of which one is the other way round, and which one that is: what has not
run for long may take another time by now"""
LEARNS = 0.2
"""What the latest step counts for in what is expected of a row"""
COSTS = 1.2
"""What a step with drafts takes, in steps without, before both were measured"""
FORGETS = 1.01
"""How fast the least time of a step grows until a step confirms it: some are held up by other things"""
DRAFTED_ROWS = (8, 32)
"""Rows of a step with drafts at most, on a CPU and on a GPU. More of them keep the device busy without drafts."""
ENDING = 4
"""Prompts that may end in a step with drafts: logits are computed for each place of their rows, and one is used"""
PAYS = 1.05
"""What a step with drafts must give beyond its costs"""

ANSWER_TOKENS = 256
"""Tokens of an answer for which a table of suffixes has room"""
KNOWN_TENANTS, MAX_TENANT = 4096, 2**31 - 1
"""Tenants that have numbers at a time, and the last number; none is given again, so no entry changes its owner"""

FEW = 24
"""Lines of observed steps that are taken in one by one"""
LOOKS = 4
"""Steps without drafts between two looks at what they would have given, and steps of any kind between two decisions"""

Learner = Callable[[Kernels, Tensor, Tensor, Tables], None]
"""(kernels, rows int32 [N], tokens int32 [N, W], tables), after `finish` of every step, whose `out` are the tokens"""
Drafter = Callable[[Kernels, Tensor, Tables], None]
"""(kernels, rows int32 [N], tables), at the end of a step: writes drafts after the history of each row that may have
them, and DRAFTED."""


class Head(Protocol):
    """A drafter that is part of the model: it drafts at the beginning of the step that verifies."""

    def beside(self, model: Any) -> Self:
        """Return this head beside another form of its model."""
        ...

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


@dataclass(frozen=True)
class SuffixLookup:
    """Drafts what followed a row's last tokens before, in its history or in answers of its tenant: where the match is
    longer (after Oliaro et al., "SuffixDecoding", 2024, with a hash table of fixed size in place of suffix trees)."""

    longest: int
    """Tokens of a match, at most"""
    asked: Recall
    table: Tensor

    @classmethod
    def of(cls, config: SpeculativeConfig, device: torch.device) -> SuffixLookup:
        """Allocate the table that the configuration asks for."""
        drafts = config.num_speculative_tokens
        longest = min(SUFFIX_LENGTHS[-1], config.suffix_decoding_max_tree_depth - drafts)
        lengths = sum(length <= longest for length in SUFFIX_LENGTHS)
        entries = 1 << (config.suffix_decoding_max_cached_requests * ANSWER_TOKENS - 1).bit_length()
        factor, least = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        asked = Recall(drafts, round(1000 * factor), round(1000 * least))
        return cls(longest, asked, new_suffixes(lengths, entries, device))

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        same = kernels.look_up(rows, tables, self.asked.most, (SUFFIX_LENGTHS[0], self.longest))
        kernels.recall(rows, same, tables, self.table, self.asked)

    def learn(self, kernels: Kernels, rows: Tensor, tokens: Tensor, tables: Tables) -> None:
        """Note what rows got, for other rows of their tenants."""
        kernels.remember(rows, tokens, tables, self.table)


def no_guesses(kernels: Kernels, rows: Tensor, tables: Tables) -> None:
    """A drafter that has no drafts of its own: rows with forms get those that their matchers expect."""
    rows = rows.long()
    tables.state[:, DRAFTED].index_copy_(0, rows, tables.state[:, LENGTH].index_select(0, rows))


class Tenants:
    """Numbers the tenants whose answers rows may share, by the salts of their prefix caches."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def number(self, salt: str) -> int:
        """Return the number of a tenant: one that has not come for long gets another. 0 once all have been given."""
        number = self._numbers.pop(salt, 0)
        if not number and self._last < MAX_TENANT:
            number = self._last = self._last + 1
        self._numbers[salt] = number
        if len(self._numbers) > KNOWN_TENANTS:
            self._numbers.popitem(last=False)
        return number


class Speculation(NamedTuple):
    """How an engine speculates."""

    drafts: int
    """Drafts of a row in a step"""
    drafter: Drafter | None
    rows: int
    """Rows of a step with drafts, at most"""
    head: Head | None = None
    """What drafts instead of a drafter"""
    learner: Learner | None = None
    """What else a drafter does"""

    @property
    def places(self) -> int:
        """Tokens of a row that a step with drafts runs, and the most that it gives."""
        return self.drafts + 1

    @property
    def samples(self) -> int:
        """Logits of a step with drafts, at most."""
        return (self.rows + ENDING) * self.places


def drafted_rows(kind: str, rows: int) -> int:
    """Return how many rows a step with drafts has at most on this kind of device, in an engine of `rows`."""
    return min(rows, DRAFTED_ROWS[kind == "cuda"])


def most_drafts(request: Request) -> int:
    """Return how many drafts a request may have in a step: none where a function of the user's sees each token."""
    params = request.params
    sees = request.processors or params.prefix_allowed_tokens_fn is not None
    return MAX_DRAFTS if params.speculate and not sees else 0


class Verify(NamedTuple):
    """What a step does about drafts."""

    places: int
    """Tokens of each row: 1 without drafts"""
    drafts: bool
    """Whether rows get drafts for the next step"""


PLAIN = Verify(1, drafts=False)


Kind = tuple[int, int]
"""Bits of a step's number of decode rows, and of that of its prompt tokens"""


def kind_of(rows: int, prompt: int = 0) -> Kind:
    """Return the kind of a step of `rows` decode rows and `prompt` prompt tokens."""
    return rows.bit_length(), prompt.bit_length()


class DraftCounts:
    """Counts what became of drafts."""

    def __init__(self, drafts: int) -> None:
        self.drafts = 0
        """Rows that ran drafts, each step for itself"""
        self.draft_tokens = 0
        self.accepted = np.zeros(drafts, np.int64)
        """Draft tokens that were right, by their place"""


class Gate:
    """Decides which steps run drafts. Drafters draft in other decode steps too, to see what that would give.

    Steps are of one kind when they have about as many decode rows, and about as many prompt tokens beside them.
    """

    def __init__(self, speculation: Speculation, rows: int) -> None:
        self._most = speculation.rows
        self._verifies = Verify(speculation.places, drafts=True)
        self._looks = speculation.head is None
        self._otherwise = Verify(1, drafts=True) if self._looks else PLAIN
        """What steps do where drafts do not pay"""
        self._hopes = (HOPE, HOPE) if self._looks else (1.0, HEAD_HOPE)
        """How often a new row is expected to have drafts, and these to be right"""
        self._decisions = Counter[Kind]()
        """How many were made for steps of each kind"""
        self._may = np.zeros(rows + 1, bool)
        self.there, self.right = np.zeros((2, rows + 1))
        """How often each row has drafts, and how often one of them is right"""
        self._places = np.arange(1, speculation.places)
        self._rows: tuple[int, ...] = ()
        self._index: Int64s = np.empty(0, np.int64)
        self._steps, self._now = 0, PLAIN
        self._ns: dict[tuple[Kind, bool], float] = {}
        """Least time lately of a step of each kind, or of each of its prompt tokens, and whether it has drafts"""
        self._held: dict[tuple[Kind, bool], float] = {}
        """The share of rows that such steps held for want of masks"""
        self._counts = DraftCounts(speculation.drafts)
        self._seen: list[tuple[Int32s, Int32s]] = []
        """Steps that were observed and not taken in: rows [N] and their tokens [N, W]"""
        self._places_seen = 1

    def admit(self, row: int, request: Request) -> None:
        """The row begins to serve a request."""
        self._take_in()
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
        self._take_in()
        kind, gain = kind_of(len(decode)), self._gain(self._index)
        measured = self._looks or (kind, False) in self._ns
        self._now = self._verifies if measured and self._tries(kind, gain) else self._otherwise
        return self._now

    def decide_beside(self, decode: tuple[int, ...], prompt: int, ending: int) -> Verify:
        """Return what the next step of these rows does, beside `prompt` prompt tokens: drafts run where they would pay
        without these too. `ending` is how many prompts end in it."""
        if not 0 < len(decode) <= self._most or ending > ENDING:
            return PLAIN
        self._take_in()
        gain = self._gain(self._index if decode is self._rows else np.array(decode, np.int64))
        pays = 1 + gain >= PAYS * self._costs(kind_of(len(decode)))
        return self._verifies if pays and self._tries(kind_of(len(decode), prompt), gain) else PLAIN

    def _gain(self, rows: Int64s) -> float:
        """Return how many drafts of a row are expected to be kept in a step."""
        right = self.right[rows, None] ** self._places
        return float((right.sum(1) * self.there[rows]).mean())

    def _tries(self, kind: Kind, gain: float) -> bool:
        """Return whether steps of this kind run drafts, of which a row is expected to keep `gain`: where that pays,
        and now and then the other way round. What drafts cost is known from steps with and without; what those of a
        head give, from steps with them alone."""
        pays = 1 + gain >= PAYS * self._costs(kind)
        self._decisions[kind] += 1
        trial = self._decisions[kind] % RETRY == FIRST and (not self._looks or 1 + gain >= PAYS)
        return pays != trial

    def learn(self, kind: Kind, batch: BatchShape, ns: int, held: float = 0.0) -> None:
        """A step of this kind, which ran as `batch`, took device or host `ns`, and held this share of its rows."""
        key = kind, batch.places > 1
        before = self._held.get(key, held)
        self._held[key] = before + LEARNS * (held - before)
        time = ns / max(1, batch.tokens - batch.decode)
        self._ns[key] = min(time, FORGETS * self._ns.get(key, time))

    def _costs(self, kind: Kind) -> float:
        with_drafts, without = (self._time((kind, drafts)) for drafts in (True, False))
        return max(1.0, with_drafts / without) if with_drafts and without else COSTS

    def _time(self, key: tuple[Kind, bool]) -> float:
        """Return how long such a step takes for each of its rows that gets tokens; 0 before one has run."""
        return self._ns.get(key, 0.0) / max(0.01, 1 - self._held.get(key, 0.0))

    def observe(self, rows: Int32s, tokens: Int32s, places: int) -> None:
        """A step gave these rows `tokens` [N, W], as `step.outbox` has them. Several steps are taken in at a time."""
        if places == 1 and (self._steps % LOOKS or not self._looks):
            return
        if self._seen and places != self._places_seen:
            self._take_in()
        self._places_seen = places
        self._seen.append((rows.copy(), tokens.copy()))
        if len(self._seen) == 4 * LOOKS:  # decisions take them in before
            self._take_in()

    def _take_in(self) -> None:
        """Learn from the steps that were observed since the last call."""
        if not self._seen:
            return
        seen, steps = self._seen, len(self._seen)
        self._seen = []
        if sum(len(rows) for rows, _ in seen) <= FEW:
            lines = (line for rows, tokens in seen for line in zip(rows.tolist(), tokens.tolist(), strict=True))
            shares = [share for row, line in lines if (share := self._take_line(row, line)) is not None]
            self._learn_hope(steps, sum(shares) / max(1, len(shares)) if shares else None)
            return
        rows, tokens = (np.concatenate(part) for part in zip(*seen, strict=True))
        held = tokens[:, 0] == NO_TOKEN  # without its mask, nothing is known of what a row sampled
        if np.count_nonzero(held):
            rows, tokens = rows[~held], tokens[~held]
        there = tokens[:, 1] != NO_TOKEN
        _move(self.there, rows, there)
        rows, tokens = rows[there], tokens[there]
        if self._places_seen > 1:
            given = tokens[:, 1:] >= 0
            self._counts.drafts += len(rows)
            self._counts.draft_tokens += int(np.count_nonzero(tokens[:, 1:] != NO_TOKEN))
            self._counts.accepted += given.sum(0)
            # As many were right as were taken, and one more was looked at unless that were all.
            right = given.sum(1)
            share = right / np.maximum(1, right + (tokens[:, 1:] == REJECTED).any(1))
        else:
            share = tokens[:, 1] == RIGHT
        _move(self.right, rows, share)
        self._learn_hope(steps, float(share.mean()) if len(share) else None)

    def _take_line(self, row: int, tokens: list[int]) -> float | None:
        """Do the same for one row of one step: arrays cost more than a few rows do. Returns the share of right drafts,
        None where there were none."""
        if tokens[0] == NO_TOKEN:
            return None
        there = tokens[1] != NO_TOKEN
        self.there[row] += LEARNS * (there - self.there[row])
        if not there:
            return None
        share = float(tokens[1] == RIGHT)
        if self._places_seen > 1:
            drafted = len(tokens) - 1 - tokens.count(NO_TOKEN)
            right = drafted - tokens.count(REJECTED)
            self._counts.drafts += 1
            self._counts.draft_tokens += drafted
            self._counts.accepted[:right] += 1
            share = right / max(1, min(drafted, right + 1))
        self.right[row] += LEARNS * (share - self.right[row])
        return share

    def _learn_hope(self, steps: int, share: float | None) -> None:
        """Learn what a new row may expect of a head."""
        if not self._looks and share is not None:
            usual = self._hopes[1]
            self._hopes = 1.0, usual + (1 - (1 - USUAL) ** steps) * (share - usual)

    @property
    def counts(self) -> DraftCounts:
        """What became of drafts so far."""
        self._take_in()
        return self._counts


def _move(expected: npt.NDArray[np.float64], rows: Int32s, seen: npt.NDArray[Any]) -> None:
    """Move what is expected of each row by LEARNS towards what was seen of it, for each time that it is listed."""
    times = np.bincount(rows, minlength=len(expected))
    mean = np.bincount(rows, seen, len(expected)) / np.maximum(1, times)
    expected += (1 - (1 - LEARNS) ** times) * (mean - expected)
