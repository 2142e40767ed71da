"""Speculation: drafters on the device, and the choice of steps that run drafts.

A step with drafts gives a row each right draft and one more token. It costs more than a step without, so the host
counts these tokens, and stops drafts that do not pay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from gapless.base.records import Int32s, Int64s, Request
from gapless.base.speculative import MAX_DRAFTS, DraftCounts, SpeculativeConfig
from gapless.kernels.layout import DRAFTED, LENGTH, NO_TOKEN, RIGHT, SUFFIX_LENGTHS
from gapless.kernels.seam import Kernels
from gapless.kernels.suffixes import new_suffixes
from gapless.kernels.tables import Tables
from gapless.kernels.views import Recall
from gapless.model.seam import BatchShape, KVCache, StepInputs

FEWER = (2, 4)
"""Drafts of a row in steps with fewer than the maximum"""

HOPE = 0.5
"""Prior chance that a new row has drafts, and that they are right"""
HEAD_HOPE = 0.8
"""Prior chance that a head's drafts are right: it always has some"""
USUAL = 0.01
"""Weight of a row's latest step, of at most MOST_PENDING at once, in the prior of a new row; and the share by which
each new row returns the prior to its first value, as rows may have drafts again unobserved."""
RETRY, FIRST_TRIAL = 256, 32
"""Steps of a kind between trials of another number of drafts, and before the first: step times may change unobserved"""
LOOK_STEPS = 4
"""Steps without drafts between two looks at hypothetical drafts, and steps of any kind between two decisions"""
SELDOM, DRAFTING = 4 * LOOK_STEPS, 16 * LOOK_STEPS
"""Most steps between two decisions that repeat the last: to skip drafts, which may soon pay, and to run them. A
decision costs the host as much as a few steps."""
MOST_PENDING = 2 * DRAFTING
"""Most steps taken in together"""
LEARNS, BEYOND = 0.2, 0.05
"""Weight of the latest step for a row, and for its drafts beyond the ones that the step ran"""
LEARNT = 1 - (1 - np.array([[LEARNS], [BEYOND], [0.0]])) ** np.arange(MOST_PENDING + 1)
"""Weight of a number of steps: for a place that they ran, for one beyond, and for one beyond a look"""
COSTS = 1.2
"""Time of a step with drafts, in steps without, before both were measured"""
FORGETS = 1.01
"""Growth per step of the recorded least time: outliers must fade"""
DRAFTED_ROWS = (8, 32)
"""Most rows of a step with drafts, on a CPU and on a GPU. More rows keep the device busy without drafts."""
ENDING = 4
"""Most prompts that end in a step with drafts: logits are computed for each place of their rows, and one is used"""
PAYS = 1.05
"""Least gain of a step with drafts, in times of its cost"""

ANSWER_TOKENS = 256
"""Tokens of an answer that a table of suffixes has room for"""
KNOWN_TENANTS, MAX_TENANT = 4096, 2**31 - 1
"""Most numbered tenants at a time, and the last number; numbers are never reused, so no entry changes its owner"""

Learner = Callable[[Kernels, Tensor, Tensor, Tables], None]
"""(kernels, rows int32 [N], tokens int32 [N, W], tables), run with the tokens after `finish` of every step"""
Drafter = Callable[[Kernels, Tensor, Tables], None]
"""(kernels, rows int32 [N], tables), run at the end of a step: writes DRAFTED, and drafts after the history of each row
that may have them."""


class Head(Protocol):
    """A drafter that is part of the model: it drafts at the beginning of the step that verifies."""

    def beside(self, model: Any) -> Self:
        """Return this head for another form of its model."""
        ...

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        """Write DRAFTED of rows int32 [N], before a step's inputs are made: up to `drafts` for rows that may have
        any."""
        ...

    def forward(self, inputs: StepInputs, plan: Any, tables: Tables, cache: KVCache) -> Tensor:
        """Write the drafts to the history and to the inputs of places after the first; then run `Model.forward`."""
        ...


@dataclass(frozen=True)
class PromptLookup:
    """Drafts the tokens that followed the last occurrence of a row's latest tokens (Saxena, "Prompt Lookup Decoding",
    2023)."""

    most: int
    shortest: int
    longest: int

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        kernels.look_up(rows, tables, self.most, self.shortest, self.longest)


@dataclass(frozen=True)
class SuffixLookup:
    """Drafts the tokens that followed a row's latest tokens in its history or in answers of its tenant, by the longer
    match (after Oliaro et al., "SuffixDecoding", 2024, with a hash table of fixed size in place of suffix trees)."""

    longest: int
    """Most tokens of a match"""
    asked: Recall
    table: Tensor

    @classmethod
    def of(cls, config: SpeculativeConfig, device: torch.device) -> SuffixLookup:
        """Allocate the table of the configuration."""
        drafts = config.num_speculative_tokens
        longest = min(SUFFIX_LENGTHS[-1], config.suffix_decoding_max_tree_depth - drafts)
        lengths = sum(length <= longest for length in SUFFIX_LENGTHS)
        entries = 1 << (config.suffix_decoding_max_cached_requests * ANSWER_TOKENS - 1).bit_length()
        factor, least = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        asked = Recall(drafts, round(1000 * factor), round(1000 * least))
        return cls(longest, asked, new_suffixes(lengths, entries, device))

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        same = kernels.look_up(rows, tables, self.asked.most, SUFFIX_LENGTHS[0], self.longest)
        kernels.recall(rows, same, tables, self.table, self.asked)

    def learn(self, kernels: Kernels, rows: Tensor, tokens: Tensor, tables: Tables) -> None:
        """Add the rows' new tokens to the table, for other rows of their tenants."""
        kernels.remember(rows, tokens, tables, self.table)


def no_guesses(kernels: Kernels, rows: Tensor, tables: Tables) -> None:
    """Draft nothing: rows with forms get the drafts expected by their matchers."""
    rows = rows.long()
    tables.state[:, DRAFTED].index_copy_(0, rows, tables.state[:, LENGTH].index_select(0, rows))


class Tenants:
    """Numbers of tenants that share answers, by the salts of their prefix caches."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def number(self, salt: str) -> int:
        """Return a tenant's number: a long absent one gets a new number. 0 once all are used."""
        number = self._numbers.pop(salt, 0)
        if not number and self._last < MAX_TENANT:
            number = self._last = self._last + 1
        self._numbers[salt] = number
        if len(self._numbers) > KNOWN_TENANTS:
            self._numbers.popitem(last=False)
        return number


class Speculation(NamedTuple):
    drafts: int
    drafter: Drafter | None
    rows: int
    """Most rows of a step with drafts"""
    head: Head | None = None
    """Drafting head, in place of a drafter"""
    learner: Learner | None = None
    """Update after each step, for drafters that learn"""

    @property
    def places(self) -> int:
        """Most tokens of a row in a step with drafts, in and out."""
        return self.drafts + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of places of steps with drafts, ascending, the last `places`."""
        return (*(1 + drafts for drafts in FEWER if drafts < self.drafts), self.places)

    @property
    def samples(self) -> int:
        """Most logits of a step with drafts."""
        return (self.rows + ENDING) * self.places


def drafted_rows(kind: str, rows: int) -> int:
    """Return the most rows of a step with drafts on this kind of device, in an engine of `rows`."""
    return min(rows, DRAFTED_ROWS[kind == "cuda"])


def most_drafts(request: Request) -> int:
    """Return the most drafts of a request in a step: none if a user's function sees each token."""
    params = request.params
    sees = request.processors or params.prefix_allowed_tokens_fn is not None
    return MAX_DRAFTS if params.speculate and not sees else 0


class Verify(NamedTuple):
    """Drafts of a step."""

    places: int
    """Tokens of each row: 1 without drafts"""
    drafts: bool
    """Whether rows get drafts for the next step"""


WITHOUT_DRAFTS = Verify(1, drafts=False)


StepKind = tuple[int, int]
"""Bit lengths of a step's decode rows and prompt tokens"""


def kind_of(rows: int, prompt: int = 0) -> StepKind:
    """Return the kind of a step of `rows` decode rows and `prompt` prompt tokens."""
    return rows.bit_length(), prompt.bit_length()


class Gate:
    """Chooses the number of drafts of a step, 0 included. Drafters also draft in steps without, to see the hypothetical
    gain.

    Steps of one kind have similar numbers of decode rows and of prompt tokens.
    """

    def __init__(self, speculation: Speculation, rows: int) -> None:
        self._most = speculation.rows
        self._sizes, self._places = speculation.sizes, speculation.places
        self._looks = speculation.head is None
        self._otherwise = Verify(1, drafts=True) if self._looks else WITHOUT_DRAFTS
        """Choice for steps if drafts do not pay"""
        self._place = {drafts: _places(speculation.drafts, drafts) for drafts in range(speculation.places)}
        self._hopes = np.full(speculation.drafts, HOPE if self._looks else HEAD_HOPE)
        """`keeps` of a new row"""
        if self._looks:
            self._hopes[0] *= HOPE  # it may have no drafts
        self._first_hopes = self._hopes
        self._drafted = True
        """Whether the last observed step wrote drafts"""
        self.keeps = np.zeros((rows + 1, speculation.drafts))
        """Chance that a draft at each place of each row is right, given the ones before it; 0 without drafts"""
        self._untried, self._trials = dict[StepKind, int](), Counter[StepKind]()
        """Steps of each kind before the next trial, and trials due so far"""
        self._rows: tuple[int, ...] = ()
        self._index: Int64s = np.empty(0, np.int64)
        self._steps, self._now, self._best = 0, WITHOUT_DRAFTS, 1
        """Steps of these rows, their present choice, and their best number of places outside trials"""
        self._wait, self._decided, self._next = LOOK_STEPS, 0, 1
        """Steps between two decisions, the step of the last, and of the next"""
        self._ns: dict[tuple[StepKind, int], float] = {}
        """Recent least time of a step of each kind and number of places, or of each of its prompt tokens"""
        self._held: dict[tuple[StepKind, int], float] = {}
        """Share of rows held in such steps, for lack of masks"""
        self._verified, self._accepted = np.zeros((2, speculation.drafts), np.int64)
        self._seen: list[bytes] = []
        """Tokens of observed steps not yet taken in, all with these rows and places, and the same choice before"""
        self._seen_rows, self._seen_places, self._seen_drafted = self._index, 1, True

    def admit(self, row: int, request: Request) -> None:
        """Start a row for a request."""
        self._take_in()
        may = most_drafts(request) > 0
        self._hopes = self._hopes + may * USUAL * (self._first_hopes - self._hopes)
        self.keeps[row] = may * self._hopes

    def decide(self, decode: tuple[int, ...]) -> Verify:
        """Return the choice for the next step of these rows."""
        if not 0 < len(decode) <= self._most:
            return WITHOUT_DRAFTS
        if decode is not self._rows:
            self._rows, self._index, self._steps = decode, np.array(decode, np.int64), 0
            self._wait, self._decided, self._next = LOOK_STEPS, 0, 1
        self._steps += 1
        if self._steps < self._next:
            return self._now
        self._take_in()
        kind = kind_of(len(decode))
        measured = self._looks or (kind, 1) in self._ns
        ran = max(LOOK_STEPS, self._steps - self._decided)
        best, places = self._choose(kind, self._gains(self._index), ran) if measured else (1, 1)
        self._now = Verify(places, drafts=True) if places > 1 else self._otherwise
        settled = best == self._best and self._trials[kind] > 0 and self._steps > 1
        self._wait = min(2 * self._wait, DRAFTING if best > 1 else SELDOM) if settled else LOOK_STEPS
        self._best, self._decided = best, self._steps
        self._next = self._steps + (
            min(self._wait, self._untried.get(kind, LOOK_STEPS)) if places == best else LOOK_STEPS
        )
        return self._now

    def decide_beside(self, decode: tuple[int, ...], prompt: int, ending: int) -> Verify:
        """Return the choice for the next step of these rows with `prompt` prompt tokens: the most drafts, if they would
        pay without the prompt tokens too, or none. `ending` is the number of prompts that end in it."""
        if not 0 < len(decode) <= self._most or ending > ENDING:
            return WITHOUT_DRAFTS
        self._take_in()
        gains = self._gains(self._index if decode is self._rows else np.array(decode, np.int64))[-1:]
        pays = self._fastest(kind_of(len(decode)), gains) > 1
        # A choice holds for one step here. Counting it as LOOK_STEPS gives trials their share of steps without chunks.
        places = self._choose(kind_of(len(decode), prompt), gains, LOOK_STEPS)[1] if pays else 1
        return Verify(places, drafts=True) if places > 1 else WITHOUT_DRAFTS

    def _gains(self, rows: Int64s) -> list[tuple[int, float]]:
        """Return the expected tokens of a row for each number of places with drafts."""
        kept = (np.add.reduce(self.keeps[rows].cumprod(1), 0) / len(rows)).cumsum().tolist()
        return [(places, 1 + kept[places - 2]) for places in self._sizes]

    def _fastest(self, kind: StepKind, gains: list[tuple[int, float]]) -> int:
        """Return the number of places with the most tokens for its time, from `gains` and 1."""
        rate, places = max([(tokens / self._cost(kind, places), places) for places, tokens in gains])
        return places if rate >= PAYS else 1

    def _choose(self, kind: StepKind, gains: list[tuple[int, float]], steps: int) -> tuple[int, int]:
        """Return the best number of places, and the one to run: now and then another in turn, which may have become the
        best. Steps without drafts show the gain of drafts too, except a head's. `steps` ran since the last choice."""
        best, left = self._fastest(kind, gains), self._untried.get(kind, FIRST_TRIAL) - steps
        self._untried[kind] = left if left > 0 else RETRY
        others = [places for places, tokens in gains if places != best and (tokens >= PAYS or not self._looks)]
        if best > 1:  # all costs are in steps without
            others = [places for other in others for places in (1, other)] or [1]
        if left > 0:
            return best, best
        self._trials[kind] += 1
        return best, others[(self._trials[kind] - 1) % len(others)] if others else best

    def learn(self, kind: StepKind, batch: BatchShape, ns: int, held: float = 0.0) -> None:
        """Take in a step of this kind and `batch`: `ns` of device or host, and the `held` share of its rows."""
        key = kind, batch.places
        if held or (self._held and key in self._held):
            before = self._held.get(key, 0.0)
            self._held[key] = before + LEARNS * (held - before)
        time = ns / max(1, batch.tokens - batch.decode) if batch.chunks else ns
        least = FORGETS * self._ns.get(key, time)
        self._ns[key] = time if time < least else least

    def _cost(self, kind: StepKind, places: int) -> float:
        """Return the time of such a step, in steps without drafts. A draft is assumed to cost as much as one of the
        nearest measured number of places."""
        plain = self._time(kind, 1)
        ran = [size for size in self._sizes if (kind, size) in self._ns]
        if not plain or not ran:
            return COSTS
        nearest = min(ran, key=lambda size: abs(size - places))
        more = max(0.0, self._time(kind, nearest) / plain - 1)
        return 1 + more * (places - 1) / (nearest - 1)

    def _time(self, kind: StepKind, places: int) -> float:
        """Return the time of such a step per row that gets tokens; 0 before one has run."""
        key = kind, places
        return self._ns.get(key, 0.0) / max(0.01, 1 - self._held.get(key, 0.0))

    def observe(self, rows: Int64s, tokens: Int32s, verify: Verify) -> None:
        """Take in the tokens [N, W] of a step's decode rows, in the form of `step.outbox`, and its choice. Several
        steps are processed at once."""
        drafted, self._drafted = self._drafted, verify.drafts
        looks = verify.drafts and not self._steps % LOOK_STEPS
        if not 0 < len(rows) <= self._most or (verify.places == 1 and not looks):
            return  # without rows there are no lines
        same = rows is self._seen_rows or rows.tolist() == self._seen_rows.tolist()
        alike = same and verify.places == self._seen_places and drafted == self._seen_drafted
        if not alike or len(self._seen) == MOST_PENDING:
            self._take_in()
            self._seen_rows, self._seen_places, self._seen_drafted = rows, verify.places, drafted
        self._seen.append(tokens.tobytes())

    def _take_in(self) -> None:
        """Learn from the steps observed since the last call."""
        if not self._seen:
            return
        rows, ran = self._seen_rows, self._seen_places - 1
        tokens = np.frombuffer(b"".join(self._seen), np.int32).reshape(len(self._seen), len(rows), -1)
        self._seen.clear()
        taken = tokens >= 0
        if ran:
            self._verified[:ran] += _verified(tokens, ran)
        else:
            taken[:, :, 1] = taken[:, :, 0] & (tokens[:, :, 1] == RIGHT)  # a held row gives no evidence
        if not self._seen_drafted:  # a form may have drafted
            taken &= (tokens[:, :, 1] != NO_TOKEN)[:, :, None]
        # A place counts if all before it were right: if the token before it exists.
        place, beyond = self._place[ran]
        got = np.add.reduce(taken, 0)
        times, share = got.take(place, 1), got.take(place + 1, 1)
        self._accepted[:ran] += np.add.reduce(got, 0)[1 : ran + 1]
        keeps = self.keeps[rows]
        self.keeps[rows] = keeps + LEARNT[beyond, times] * (share / np.maximum(times, 1) - keeps)
        # The prior of new rows follows the rows that may have drafts, at places that looks include.
        drafting = keeps[:, 0] > 0
        seen, right = drafting @ times * (beyond < 2), drafting @ share
        forgets = (1 - USUAL) ** np.minimum(seen, MOST_PENDING)
        self._hopes = self._hopes + (1 - forgets) * (right / np.maximum(seen, 1) - self._hopes)

    def report(self) -> DraftCounts:
        self._take_in()
        return DraftCounts(tuple(self._verified.tolist()), tuple(self._accepted.tolist()))


def _verified(tokens: Int32s, ran: int) -> list[int]:
    """Return the rows that verified a draft at each of `ran` places. A held row verified none, and an ended row none
    after its last token: its outbox has REJECTED there too."""
    there, counts = (tokens != NO_TOKEN).reshape(-1, tokens.shape[2]).T, []
    row = there[0]
    for place in there[1 : ran + 1]:
        row = row & place
        counts.append(int(np.count_nonzero(row)))
    return counts


def _places(most: int, ran: int) -> tuple[Int64s, Int64s]:
    """Return the place that each of `most` drafts counts as in steps that ran `ran`, and its line of LEARNT. Drafts
    beyond count as the last one run, with less weight; looks show the first alone."""
    place, last = np.arange(most), max(ran, 1) - 1
    return np.minimum(place, last), (place > last) * (1 if ran else 2)
