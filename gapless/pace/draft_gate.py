"""The draft gate: the number of drafts of a step.

A step with drafts gives a row each right draft and one more token. It costs more than a step without, so the host
counts these tokens, and stops drafts that do not pay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gapless.base.records import NO_TOKEN, RIGHT, Int32s, Int64s, Request
from gapless.pace.mean import Mean

FEWER = (2, 4)
"""[drafts] Drafts of a row in steps with fewer than the maximum"""

HOPE = 0.5
"""[chance] Prior chance that a new row has drafts, and that they are right"""
HEAD_HOPE = 0.8
"""[chance] Prior chance that a head's drafts are right: it always has some"""
USUAL = 0.01
"""[weight] Weight of a row's latest step, of at most MOST_PENDING at once, in the prior of a new row; and the share by
which each new row returns the prior to its first value, as rows may have drafts again unobserved."""
RETRY, FIRST_TRIAL = 256, 32
"""[steps] Steps of a kind between trials of another number of drafts, and before the first: step times may change
unobserved"""
LOOK_STEPS = 4
"""[steps] Steps without drafts between two looks at hypothetical drafts, and steps of any kind between two decisions"""
SELDOM, DRAFTING = 4 * LOOK_STEPS, 16 * LOOK_STEPS
"""[steps] Most steps between two decisions that repeat the last: to skip drafts, which may soon pay, and to run them. A
decision costs the host as much as a few steps."""
MOST_PENDING = 2 * DRAFTING
"""[steps] Most steps taken in together"""
LEARNS, BEYOND = 0.2, 0.05
"""[weight] Weight of the latest step for a row, and for its drafts beyond the ones that the step ran"""
LEARNT = 1 - (1 - np.array([[LEARNS], [BEYOND], [0.0]])) ** np.arange(MOST_PENDING + 1)
"""Weight of a number of steps: for a place that they ran, for one beyond, and for one beyond a look"""
COSTS = 1.2
"""[times] Time of a step with drafts, in steps without, before both were measured"""
FORGETS = 1.01
"""[times] Growth per step of the recorded least time: outliers must fade"""
ENDING = 4
"""[prompts] Most prompts that end in a step with drafts: logits are computed for each place of their rows, and one is
used"""
PAYS = 1.05
"""[times] Least gain of a step with drafts, in times of its cost"""


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


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of rows that got tokens, by place: few rows may run many."""

    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    """The right ones among them"""

    @property
    def drafts(self) -> int:
        """Rows that verified drafts, summed over steps"""
        return sum(self.verified[:1])

    @property
    def draft_tokens(self) -> int:
        return sum(self.verified)

    @property
    def right(self) -> int:
        return sum(self.accepted)


class RowBeliefs:
    """Chances that the drafts of rows are right, from observed steps. Several steps are taken in at once."""

    def __init__(self, rows: int, sizes: tuple[int, ...], looks: bool) -> None:
        drafts = sizes[-1] - 1
        self._sizes = sizes
        self._place = {ran: _places(drafts, ran) for ran in range(drafts + 1)}
        self._hopes = np.full(drafts, HOPE if looks else HEAD_HOPE)
        """`keeps` of a new row"""
        if looks:
            self._hopes[0] *= HOPE  # it may have no drafts
        self._first_hopes = self._hopes
        self.keeps = np.zeros((rows + 1, drafts))
        """Chance that a draft at each place of each row is right, given the ones before it; 0 without drafts"""
        self._verified, self._accepted = np.zeros((2, drafts), np.int64)
        self._seen: list[bytes] = []
        """Tokens of observed steps not yet taken in, all with these rows and places, and the same choice before"""
        self._seen_rows: Int64s = np.empty(0, np.int64)
        self._seen_places, self._seen_drafted = 1, True

    def report(self) -> DraftCounts:
        self.take_in()
        return DraftCounts(tuple(self._verified.tolist()), tuple(self._accepted.tolist()))

    def admit(self, row: int, request: Request) -> None:
        """Start a row for a request."""
        self.take_in()
        may = request.most_drafts > 0
        self._hopes = self._hopes + may * USUAL * (self._first_hopes - self._hopes)
        self.keeps[row] = may * self._hopes

    def gains(self, rows: Int64s) -> list[tuple[int, float]]:
        """Return the expected tokens of a row for each number of places with drafts."""
        kept = (np.add.reduce(self.keeps[rows].cumprod(1), 0) / len(rows)).cumsum().tolist()
        return [(places, 1 + kept[places - 2]) for places in self._sizes]

    def observe(self, rows: Int64s, tokens: Int32s, places: int, drafted: bool) -> None:
        """Keep the tokens [N, W] of a step's decode rows, in the form of `step.outbox`, until they are taken in;
        `drafted`: the step before wrote drafts."""
        same = rows is self._seen_rows or rows.tolist() == self._seen_rows.tolist()
        alike = same and places == self._seen_places and drafted == self._seen_drafted
        if not alike or len(self._seen) == MOST_PENDING:
            self.take_in()
            self._seen_rows, self._seen_places, self._seen_drafted = rows, places, drafted
        self._seen.append(tokens.tobytes())

    def take_in(self) -> None:
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


class StepCosts:
    """Times of steps with drafts, in steps of the same kind without."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._ns: dict[tuple[StepKind, int], float] = {}
        """Recent least time of a step of each kind and number of places, or of each of its prompt tokens"""
        self._held: dict[tuple[StepKind, int], Mean] = {}
        """Share of rows held in such steps, for lack of masks"""

    def learn(self, kind: StepKind, places: int, prompt: int, ns: int, held: float) -> None:
        """Take in a step of this kind, with `prompt` padded prompt tokens."""
        key = kind, places
        if held or (self._held and key in self._held):
            self._held.setdefault(key, Mean(LEARNS)).add(held)
        time = ns / max(1, prompt)
        least = FORGETS * self._ns.get(key, time)
        self._ns[key] = time if time < least else least

    def measured(self, kind: StepKind) -> bool:
        """Return whether such a step has run without drafts."""
        return (kind, 1) in self._ns

    def fastest(self, kind: StepKind, gains: list[tuple[int, float]]) -> int:
        """Return the number of places with the most tokens for its time, from `gains` and 1."""
        rate, places = max([(tokens / self._cost(kind, places), places) for places, tokens in gains])
        return places if rate >= PAYS else 1

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
        held = self._held.get((kind, places))
        return self._ns.get((kind, places), 0.0) / (max(0.01, 1 - held.value) if held else 1)


class Trials:
    """Now and then another number of places than the best runs, as it may have become the best. Steps without drafts
    show the gain of drafts too, except a head's."""

    def __init__(self, looks: bool) -> None:
        self._looks = looks
        self._left, self._begun = dict[StepKind, int](), Counter[StepKind]()
        """Steps of each kind before the next trial, and trials due so far"""

    def steps_left(self, kind: StepKind) -> int:
        """Return the steps of this kind before the next trial."""
        return self._left.get(kind, LOOK_STEPS)

    def ran(self, kind: StepKind) -> bool:
        """Return whether a trial of this kind was due."""
        return self._begun[kind] > 0

    def choose(self, kind: StepKind, best: int, gains: list[tuple[int, float]], steps: int) -> int:
        """Return the number of places to run; `steps` ran since the last choice."""
        left = self._left.get(kind, FIRST_TRIAL) - steps
        self._left[kind] = left if left > 0 else RETRY
        if left > 0:
            return best
        others = [places for places, tokens in gains if places != best and (tokens >= PAYS or not self._looks)]
        if best > 1:  # all costs are in steps without
            others = [places for other in others for places in (1, other)] or [1]
        self._begun[kind] += 1
        return others[(self._begun[kind] - 1) % len(others)] if others else best


class DraftGate:
    """Chooses the number of drafts of a step, 0 included.

    Steps of one kind have similar numbers of decode rows and of prompt tokens.
    """

    def __init__(self, rows: int, drafted_rows: int, sizes: tuple[int, ...], looks: bool) -> None:
        """Steps of up to `drafted_rows` of the engine's `rows` have drafts, of one of these numbers of places. With
        `looks` steps without drafts draft too, to see the hypothetical gain."""
        self._most = drafted_rows
        self.beliefs = RowBeliefs(rows, sizes, looks)
        self._costs, self._trials = StepCosts(sizes), Trials(looks)
        self._otherwise = Verify(1, drafts=looks)
        """Choice for steps if drafts do not pay"""
        self._drafted = True
        """Whether the last observed step wrote drafts"""
        self._rows: tuple[int, ...] = ()
        self._index: Int64s = np.empty(0, np.int64)
        self._steps, self._now, self._best = 0, WITHOUT_DRAFTS, 1
        """Steps of these rows, their present choice, and their best number of places outside trials"""
        self._wait, self._decided, self._next = LOOK_STEPS, 0, 1
        """Steps between two decisions, the step of the last, and of the next"""

    def report(self) -> DraftCounts:
        return self.beliefs.report()

    def admit(self, row: int, request: Request) -> None:
        """Start a row for a request."""
        self.beliefs.admit(row, request)

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
        self.beliefs.take_in()
        kind = kind_of(len(decode))
        best = places = 1
        if self._otherwise.drafts or self._costs.measured(kind):
            ran = max(LOOK_STEPS, self._steps - self._decided)
            best, places = self._choose(kind, self.beliefs.gains(self._index), ran)
        self._now = Verify(places, drafts=True) if places > 1 else self._otherwise
        settled = best == self._best and self._trials.ran(kind) and self._steps > 1
        self._wait = min(2 * self._wait, DRAFTING if best > 1 else SELDOM) if settled else LOOK_STEPS
        self._best, self._decided = best, self._steps
        self._next = self._steps + (min(self._wait, self._trials.steps_left(kind)) if places == best else LOOK_STEPS)
        return self._now

    def decide_beside(self, decode: tuple[int, ...], prompt: int, ending: int) -> Verify:
        """Return the choice for the next step of these rows with `prompt` prompt tokens: the most drafts, if they would
        pay without the prompt tokens too, or none. `ending` is the number of prompts that end in it."""
        if not 0 < len(decode) <= self._most or ending > ENDING:
            return WITHOUT_DRAFTS
        self.beliefs.take_in()
        gains = self.beliefs.gains(self._index if decode is self._rows else np.array(decode, np.int64))[-1:]
        pays = self._costs.fastest(kind_of(len(decode)), gains) > 1
        # A choice holds for one step here. Counting it as LOOK_STEPS gives trials their share of steps without chunks.
        places = self._choose(kind_of(len(decode), prompt), gains, LOOK_STEPS)[1] if pays else 1
        return Verify(places, drafts=True) if places > 1 else WITHOUT_DRAFTS

    def _choose(self, kind: StepKind, gains: list[tuple[int, float]], steps: int) -> tuple[int, int]:
        """Return the best number of places, and the one to run."""
        best = self._costs.fastest(kind, gains)
        return best, self._trials.choose(kind, best, gains, steps)

    def learn(self, kind: StepKind, places: int, prompt: int, ns: int, held: float = 0.0) -> None:
        """Take in a step of this kind, with `prompt` padded prompt tokens: `ns` of device or host, and the `held` share
        of its rows."""
        self._costs.learn(kind, places, prompt, ns, held)

    def observe(self, rows: Int64s, tokens: Int32s, verify: Verify) -> None:
        """Take in the tokens [N, W] of a step's decode rows, in the form of `step.outbox`, and its choice."""
        drafted, self._drafted = self._drafted, verify.drafts
        looks = verify.drafts and not self._steps % LOOK_STEPS
        if 0 < len(rows) <= self._most and (verify.places > 1 or looks):  # without rows there are no lines
            self.beliefs.observe(rows, tokens, verify.places, drafted)


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
