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
import torch
from torch import Tensor

from gapless.base.records import Int32s, Int64s, Request
from gapless.base.speculative import MAX_DRAFTS, SpeculativeConfig
from gapless.kernels.layout import DRAFTED, LENGTH, NO_TOKEN, RIGHT, SUFFIX_LENGTHS
from gapless.kernels.seam import Kernels
from gapless.kernels.suffixes import new_suffixes
from gapless.kernels.tables import Tables
from gapless.kernels.views import Recall
from gapless.model.seam import BatchShape, KVCache, StepInputs

FEWER = (2, 4)
"""Drafts of a row in steps that run fewer than there may be"""

HOPE = 0.5
"""How often a new row is expected to have drafts, and these to be right, before any row had some"""
HEAD_HOPE = 0.8
"""How often the drafts of a head are expected to be right: it always has some"""
USUAL = 0.01
"""What a row's latest step counts for in what is expected of a new row, of at most MOST_SEEN at a time; and how far
each new row takes that back to what it was at first, as rows may have drafts again while no step looks"""
RETRY, FIRST = 256, 32
"""Steps of about as many rows from one trial of another number of drafts than seems best to the next, and before the
first: what has not run for long may take another time by now"""
LOOKS = 4
"""Steps without drafts between two looks at what they would have given, and steps of any kind between two decisions"""
SELDOM, DRAFTING = 4 * LOOKS, 16 * LOOKS
"""Steps between two decisions, at most, where the last ones were the same: to go without drafts, which may soon pay,
and to run them. One costs the host as much as a few steps do otherwise."""
MOST_SEEN = 2 * DRAFTING
"""Steps that are taken in together, at most"""
LEARNS, BEYOND = 0.2, 0.05
"""What the latest step counts for in what is expected of a row, and of its drafts beyond those that the step ran"""
LEARNT = 1 - (1 - np.array([[LEARNS], [BEYOND], [0.0]])) ** np.arange(MOST_SEEN + 1)
"""What a number of steps count for: for a place that they ran, for one beyond, and for one beyond that of a look"""
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
        kernels.look_up(rows, tables, self.most, self.shortest, self.longest)


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
        same = kernels.look_up(rows, tables, self.asked.most, SUFFIX_LENGTHS[0], self.longest)
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
    drafts: int
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
    def sizes(self) -> tuple[int, ...]:
        """Places of a step with drafts, ascending: `places`, or fewer."""
        return (*(1 + drafts for drafts in FEWER if drafts < self.drafts), self.places)

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
    def __init__(self, drafts: int) -> None:
        self.verified, self.accepted = np.zeros((2, drafts), np.int64)
        """Draft tokens of rows that got tokens, and those of them that were right, by their place"""

    @property
    def drafts(self) -> int:
        """Rows that verified drafts, each step for itself."""
        return int(self.verified[0])

    @property
    def draft_tokens(self) -> int:
        return int(self.verified.sum())


class Gate:
    """Decides how many drafts rows run in a step, which may be none. Drafters draft in steps without too, to see what
    drafts would give.

    Steps are of one kind when they have about as many decode rows, and about as many prompt tokens beside them.
    """

    def __init__(self, speculation: Speculation, rows: int) -> None:
        self._most = speculation.rows
        self._sizes, self._places = speculation.sizes, speculation.places
        self._looks = speculation.head is None
        self._otherwise = Verify(1, drafts=True) if self._looks else PLAIN
        """What steps do where drafts do not pay"""
        self._place = {drafts: _places(speculation.drafts, drafts) for drafts in range(speculation.places)}
        self._hopes = np.full(speculation.drafts, HOPE if self._looks else HEAD_HOPE)
        """`keeps` of a new row"""
        if self._looks:
            self._hopes[0] *= HOPE  # it may have no drafts
        self._first_hopes = self._hopes
        self._drafted = True
        """Whether the step that was observed last wrote drafts"""
        self.keeps = np.zeros((rows + 1, speculation.drafts))
        """How often a draft of each row at each place is kept, where those before it were; 0 where there is none"""
        self._untried, self._trials = dict[Kind, int](), Counter[Kind]()
        """Steps of each kind before the next trial, and trials that were due"""
        self._rows: tuple[int, ...] = ()
        self._index: Int64s = np.empty(0, np.int64)
        self._steps, self._now, self._best = 0, PLAIN, 1
        """Steps of these rows, what they do now, and their number of places but for trials"""
        self._wait, self._decided, self._next = LOOKS, 0, 1
        """Steps between two decisions, the step of the last, and that of the next"""
        self._ns: dict[tuple[Kind, int], float] = {}
        """Least time lately of a step of each kind and number of places, or of each of its prompt tokens"""
        self._held: dict[tuple[Kind, int], float] = {}
        """The share of rows that such steps held for want of masks"""
        self._counts = DraftCounts(speculation.drafts)
        self._seen: list[bytes] = []
        """Tokens of steps that were observed and not taken in; each with these rows and places, after such a step"""
        self._seen_rows, self._seen_places, self._seen_drafted = self._index, 1, True

    def admit(self, row: int, request: Request) -> None:
        """The row begins to serve a request."""
        self._take_in()
        may = most_drafts(request) > 0
        self._hopes = self._hopes + may * USUAL * (self._first_hopes - self._hopes)
        self.keeps[row] = may * self._hopes

    def decide(self, decode: tuple[int, ...]) -> Verify:
        """Return what the next step of these rows does."""
        if not 0 < len(decode) <= self._most:
            return PLAIN
        if decode is not self._rows:
            self._rows, self._index, self._steps = decode, np.array(decode, np.int64), 0
            self._wait, self._decided, self._next = LOOKS, 0, 1
        self._steps += 1
        if self._steps < self._next:
            return self._now
        self._take_in()
        kind = kind_of(len(decode))
        measured = self._looks or (kind, 1) in self._ns
        ran = max(LOOKS, self._steps - self._decided)
        best, places = self._choose(kind, self._gains(self._index), ran) if measured else (1, 1)
        self._now = Verify(places, drafts=True) if places > 1 else self._otherwise
        settled = best == self._best and self._trials[kind] > 0 and self._steps > 1
        self._wait = min(2 * self._wait, DRAFTING if best > 1 else SELDOM) if settled else LOOKS
        self._best, self._decided = best, self._steps
        self._next = self._steps + (min(self._wait, self._untried.get(kind, LOOKS)) if places == best else LOOKS)
        return self._now

    def decide_beside(self, decode: tuple[int, ...], prompt: int, ending: int) -> Verify:
        """Return what the next step of these rows does, beside `prompt` prompt tokens: as many drafts run as there may
        be, where they would pay without these too, or none. `ending` is how many prompts end in it."""
        if not 0 < len(decode) <= self._most or ending > ENDING:
            return PLAIN
        self._take_in()
        gains = self._gains(self._index if decode is self._rows else np.array(decode, np.int64))[-1:]
        pays = self._fastest(kind_of(len(decode)), gains) > 1
        # A choice holds for one step here. Counted as LOOKS, it gives trials the share of steps that they have without.
        places = self._choose(kind_of(len(decode), prompt), gains, LOOKS)[1] if pays else 1
        return Verify(places, drafts=True) if places > 1 else PLAIN

    def _gains(self, rows: Int64s) -> list[tuple[int, float]]:
        """Return how many tokens a row is expected to get from a step of each number of places with drafts."""
        kept = (np.add.reduce(self.keeps[rows].cumprod(1), 0) / len(rows)).cumsum().tolist()
        return [(places, 1 + kept[places - 2]) for places in self._sizes]

    def _fastest(self, kind: Kind, gains: list[tuple[int, float]]) -> int:
        """Return the number of places that gives most tokens for its time, of those that `gains` lists and 1."""
        rate, places = max([(tokens / self._cost(kind, places), places) for places, tokens in gains])
        return places if rate >= PAYS else 1

    def _choose(self, kind: Kind, gains: list[tuple[int, float]], steps: int) -> tuple[int, int]:
        """Return the best number of places, and that to run: now and then another one, in turn, which may have become
        the best. What drafts give is seen in steps without them too, but for those of a head. `steps` ran since the
        last choice."""
        best, left = self._fastest(kind, gains), self._untried.get(kind, FIRST) - steps
        self._untried[kind] = left if left > 0 else RETRY
        others = [places for places, tokens in gains if places != best and (tokens >= PAYS or not self._looks)]
        if best > 1:  # all costs are in steps without
            others = [places for other in others for places in (1, other)] or [1]
        if left > 0:
            return best, best
        self._trials[kind] += 1
        return best, others[(self._trials[kind] - 1) % len(others)] if others else best

    def learn(self, kind: Kind, batch: BatchShape, ns: int, held: float = 0.0) -> None:
        """A step of this kind, which ran as `batch`, took device or host `ns`, and held this share of its rows."""
        key = kind, batch.places
        if held or (self._held and key in self._held):
            before = self._held.get(key, 0.0)
            self._held[key] = before + LEARNS * (held - before)
        time = ns / max(1, batch.tokens - batch.decode) if batch.chunks else ns
        least = FORGETS * self._ns.get(key, time)
        self._ns[key] = time if time < least else least

    def _cost(self, kind: Kind, places: int) -> float:
        """Return what such a step takes, in steps without drafts. Each draft of a number of places that has not run
        is taken to cost as much as one of the nearest number that has."""
        plain = self._time(kind, 1)
        ran = [size for size in self._sizes if (kind, size) in self._ns]
        if not plain or not ran:
            return COSTS
        nearest = min(ran, key=lambda size: abs(size - places))
        more = max(0.0, self._time(kind, nearest) / plain - 1)
        return 1 + more * (places - 1) / (nearest - 1)

    def _time(self, kind: Kind, places: int) -> float:
        """Return how long such a step takes for each of its rows that gets tokens; 0 before one has run."""
        key = kind, places
        return self._ns.get(key, 0.0) / max(0.01, 1 - self._held.get(key, 0.0))

    def observe(self, rows: Int64s, tokens: Int32s, verify: Verify) -> None:
        """A step that did this gave its decode rows `tokens` [N, W], as `step.outbox` has them. Several steps are taken
        in at a time."""
        drafted, self._drafted = self._drafted, verify.drafts
        looks = verify.drafts and not self._steps % LOOKS
        if not 0 < len(rows) <= self._most or (verify.places == 1 and not looks):
            return  # where all rows have left, no line is theirs
        same = rows is self._seen_rows or rows.tolist() == self._seen_rows.tolist()
        alike = same and verify.places == self._seen_places and drafted == self._seen_drafted
        if not alike or len(self._seen) == MOST_SEEN:
            self._take_in()
            self._seen_rows, self._seen_places, self._seen_drafted = rows, verify.places, drafted
        self._seen.append(tokens.tobytes())

    def _take_in(self) -> None:
        """Learn from the steps that were observed since the last call."""
        if not self._seen:
            return
        rows, ran = self._seen_rows, self._seen_places - 1
        tokens = np.frombuffer(b"".join(self._seen), np.int32).reshape(len(self._seen), len(rows), -1)
        self._seen.clear()
        taken = tokens >= 0
        if ran:
            self._counts.verified[:ran] += _verified(tokens, ran)
        else:
            taken[:, :, 1] = taken[:, :, 0] & (tokens[:, :, 1] == RIGHT)  # a row that was held looked in vain
        if not self._seen_drafted:  # a form may have drafted
            taken &= (tokens[:, :, 1] != NO_TOKEN)[:, :, None]
        # A place counts where all before it were right: where the token before it is there.
        place, beyond = self._place[ran]
        got = np.add.reduce(taken, 0)
        times, share = got.take(place, 1), got.take(place + 1, 1)
        self._counts.accepted[:ran] += np.add.reduce(got, 0)[1 : ran + 1]
        keeps = self.keeps[rows]
        self.keeps[rows] = keeps + LEARNT[beyond, times] * (share / np.maximum(times, 1) - keeps)
        # New rows are expected to get what those got that may have drafts, at places that looks do not leave out.
        drafting = keeps[:, 0] > 0
        seen, right = drafting @ times * (beyond < 2), drafting @ share
        forgets = (1 - USUAL) ** np.minimum(seen, MOST_SEEN)
        self._hopes = self._hopes + (1 - forgets) * (right / np.maximum(seen, 1) - self._hopes)

    @property
    def counts(self) -> DraftCounts:
        self._take_in()
        return self._counts


def _verified(tokens: Int32s, ran: int) -> list[int]:
    """Return how many rows verified a draft at each of `ran` places. A row that was held verified none, and one that
    ended none after its last token: its outbox says REJECTED of wrong ones there too."""
    there, counts = (tokens != NO_TOKEN).reshape(-1, tokens.shape[2]).T, []
    row = there[0]
    for place in there[1 : ran + 1]:
        row = row & place
        counts.append(int(np.count_nonzero(row)))
    return counts


def _places(most: int, ran: int) -> tuple[Int64s, Int64s]:
    """Return as which place each of `most` drafts counts in steps that ran `ran`, and its line of LEARNT. Those that
    these steps did not run count as the last one that they ran, and less; looks are at the first alone."""
    place, last = np.arange(most), max(ran, 1) - 1
    return np.minimum(place, last), (place > last) * (1 if ran else 2)
