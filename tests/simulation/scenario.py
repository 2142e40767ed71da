"""A scenario: everything that happens in one simulated run, drawn from one seed and small enough to read."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
from adapted_checksum import NUMBERS
from automaton import ASKED, Automaton, allowed_after
from grouped_model import continue_grouped

from gapless.base.params import SamplingParams
from gapless.base.records import NO_TRANSFER, KVTransfer, Request
from gapless.loop.spec import Sizes
from gapless.testing.adversary import MOODS
from gapless.testing.checksum import continue_prompt
from gapless.testing.world import Faults

VOCAB = 97
HOSTED = 0.5
"""How often there is a host tier, where it can be"""
LOWERED = 0.7
"""How often there is a tier below the host tier, of those that there are"""
RENEWED = 0.7
"""How often the model gets other weights, where there is a host tier"""
SPOILED = 0.2
"""The share of scenarios in which KV goes bad."""
ADAPTED = 0.4
"""The share of scenarios with adapters, of those that may have them."""
NAN_TOKEN = VOCAB
"""A token that no prompt or answer holds but those that are meant to fail: reading it gives logits that are NaN."""


FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.5, "top_p": 0.01},
)
"""Ways to sample that all come to the checksum's one token, but three of them by a cut alone."""


class Failing(Automaton):
    """Allows no token, or raises, once the output has `at` tokens."""

    def __init__(self, seed: int, vocab: int, at: int) -> None:
        super().__init__(seed, vocab)
        self._at = at

    def write_mask(self, words: Any) -> None:
        super().write_mask(words)
        if len(self.states) > self._at and self.seed % 2:
            raise ValueError("a matcher that fails")
        if len(self.states) > self._at:
            words[:] = 0


class OneWay(Automaton):
    """Breaks for good when it is to go back, as it is after guesses alone."""

    def rollback(self, count: int) -> None:
        self.states = []
        raise ValueError("a matcher that cannot go back")


class Job(NamedTuple):
    """One request: when it comes, what it asks, and when its client leaves (None: stays)."""

    key: int
    arrives: int
    prompt: tuple[int, ...]
    max_len: int
    stop_ids: tuple[int, ...]
    priority: int
    salt: str
    leaves: int | None
    asks: tuple[int | None, int | None] = (None, None)
    """Log-probabilities wanted of sampled and of prompt tokens."""
    filters: int = 0
    """One of FILTERS."""
    bias: int | None = None
    """A token that is sampled instead of one that prompt or output have, unless they have it too: by a bias and a
    penalty, as `follows` says once more"""
    automaton: int | None = None
    """The seed of the matcher that decides which tokens may come"""
    adapter: str = ""
    """The name of its adapter, whatever that stands for when it arrives"""
    transfer: KVTransfer = NO_TRANSFER

    @property
    def fails_at(self) -> int | None:
        """Tokens of its output after which its matcher fails, as one of eight does."""
        return None if self.automaton is None or self.automaton // 2 % 8 else 1 + self.automaton // 16 % 6

    def request(self) -> Request:
        sampled, prompt = self.asks
        filters = FILTERS[self.filters]
        if self.bias is not None:
            filters = filters | {"logit_bias": {self.bias: 0.75}, "repetition_penalty": 2.0}
        matcher = None
        if self.automaton is not None:
            kind = OneWay if self.automaton // 2 % 8 == 1 else Automaton
            filters, matcher = filters | {"structured_outputs": ASKED}, kind(self.automaton, VOCAB)
            if self.fails_at is not None:
                matcher = Failing(self.automaton, VOCAB, self.fails_at)
        params = SamplingParams(max_tokens=None, logprobs=sampled, prompt_logprobs=prompt, **filters)
        tokens = np.array(self.prompt, np.int32)
        request = Request(self.key, tokens, params, 0, self.stop_ids, 0, self.max_len, self.priority, self.salt)
        return request._replace(matcher=matcher, adapter=self.adapter, transfer=self.transfer)

    def follows(self, known: list[int], token: int) -> int:
        """Return the token that comes where the checksum says `token`: its logit is 1, halved by the penalty. Without
        those two, all that a matcher allows have 0, and the first is the best."""
        wanted = [token]
        if self.bias is not None:
            wanted = [self.bias, token] if token in known and self.bias not in known else [token, self.bias]
        if self.automaton is None:
            return wanted[0]
        allowed = allowed_after(self.automaton, known[len(self.prompt) :], VOCAB)
        return next((token for token in wanted if token in allowed), allowed[0])


class Fault(NamedTuple):
    """What happens: `kind` is raise (a forward raises), restart (the engine is replaced), jump (of the clock), spoil
    (a token's KV comes out as NaN), flip (a bit of each copy in the host tier), rot (a bit of each page below it) or
    flush (device and host give away what is at rest there). Or what operators do: swap (an adapter's name gets another
    one), unload (an adapter goes, or comes back) or renew (the model gets other weights)."""

    kind: str
    turn: int


PAIRS = 1_000_000
"""Seeds from here on are pairs of engines, over what the seed that is as much smaller has."""
RANKS = 2_000_000
"""Seeds from here on are engines of several ranks, over what the seed that is as much smaller has"""
PEER = "unix:/the-other"
"""The name of the other engine of a pair"""
CHANGES = ("swap", "unload")
"""Kinds of faults that are changes of adapters"""


class Scenario(NamedTuple):
    """A run of `World`. Times are turns of the driver."""

    seed: int
    depth: int | None
    chain: int | None
    mood: str | None
    maps_host: bool
    prefix_caching: bool
    by_priority: bool
    sizes: Sizes
    step: str
    """What a step gives a row: one token, one or none (held), several or none."""
    grouped: bool
    """The model has two page groups."""
    tier: bool
    """Pages are stored and loaded beside the steps."""
    followers: int
    """Ranks that follow the leader."""
    drafts: float | None
    """How often drafts are wrong; None for steps without any."""
    jobs: tuple[Job, ...]
    faults: tuple[Fault, ...]
    adapters: int = 0
    """Slots for adapters; 0: there are none."""
    host: int = 0
    """Copies of pages in the host tier; 0: there is none."""
    late_ns: int = 0
    """How long a request waits for a load."""
    lower: bool = False
    """There is a tier below the host tier, which is late and fails."""
    pair: float | None = None
    """How often what is between a prefiller and a decoder goes wrong, whose jobs and faults are the others; None: there
    is no pair."""
    given: tuple[Job, ...] = ()
    """What the prefiller of a pair is asked"""
    given_faults: tuple[Fault, ...] = ()
    given_host: int = 0
    ranks: Faults = Faults()
    """What happens to the ranks"""
    mutual: bool = False
    """Both of a pair give and take."""

    def __str__(self) -> str:
        several = ("jobs", "faults", "given", "given_faults")
        lines = [f"  {name}: {getattr(self, name)}" for name in self._fields if name not in several]
        lists = [f"  {item}" for item in (*self.jobs, *self.faults)]
        return "\n".join([*lines, *lists, *(f"  the prefiller's {item}" for item in (*self.given, *self.given_faults))])


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    if seed >= RANKS:
        return _ranked(random.Random(seed), draw(seed - RANKS))._replace(seed=seed)
    if seed >= PAIRS:
        return _pair(random.Random(seed), draw(seed - PAIRS))._replace(seed=seed)
    rng = random.Random(seed)
    sizes = _sizes(rng)
    # Later ideas draw from streams of their own, so that a seed keeps what it had.
    more = random.Random(seed + 3_000_000)
    step = more.choice(("one", "one", "one", "held", "several"))
    grouped, tier = more.random() < 0.2, more.random() < 0.25
    followers = more.choice((0, 0, 0, 0, 1, 2))
    drafts = random.Random(seed + 4_000_000).choice((None, None, 0.0, 0.3, 1.0))
    scenario = Scenario(
        seed=seed,
        depth=_depth(seed, rng.choice((1, 2, 3, 4, 8, None))),
        chain=random.Random(seed + 2_000_000).choice((None, None, 2, 4, 8)),
        mood=rng.choice((None, None, *MOODS)),
        maps_host=rng.random() < 0.3,
        prefix_caching=rng.random() < 0.8,
        by_priority=rng.random() < 0.3,
        sizes=sizes,
        step=step,
        grouped=grouped,
        tier=tier,
        followers=0 if tier or step == "several" else followers,  # loads would have to go to all devices
        drafts=drafts if step == "one" else None,
        jobs=_filtering(more, step, _asking(random.Random(seed + 1_000_000), _jobs(rng, sizes.max_len))),
        faults=_faults(rng),
    )
    latest = random.Random(seed + 4_000_000)
    if grouped:
        scenario = scenario._replace(jobs=_again(latest, scenario.jobs))
    newest = random.Random(seed + 5_000_000)
    if newest.random() < 0.25 and step != "several":  # logits are those of a step's first token alone
        sizes = sizes._replace(slots=newest.randrange(1, 4))
        scenario = scenario._replace(sizes=sizes, jobs=_biased(newest, scenario.jobs))
    masks = random.Random(seed + 6_000_000)
    if masks.random() < 0.2 and step != "several":
        sizes = sizes._replace(slots=masks.randrange(1, 4))
        scenario = scenario._replace(sizes=sizes, jobs=_masked(masks, scenario.jobs))
    adapters = random.Random(seed + 7_000_000)
    alone = not (grouped or tier or scenario.followers) and step != "several"  # others have models of their own
    if alone and adapters.random() < ADAPTED:
        scenario = _adapted(adapters, scenario)
    shares = scenario.prefix_caching and not scenario.tier
    if shares and latest.random() < SPOILED:
        scenario = _spoiled(scenario, latest)
    host = random.Random(seed + 8_000_000)
    if shares and not scenario.followers and host.random() < HOSTED:
        scenario = _with_host(host, scenario)
    lower = random.Random(seed + 9_000_000)
    if scenario.host and lower.random() < LOWERED:
        scenario = _with_lower(lower, scenario)
    if scenario.followers:
        scenario = scenario._replace(ranks=_rank_faults(random.Random(seed + 12_000_000)))
    weights = random.Random(seed + 10_000_000)
    return _renewed(weights, scenario) if scenario.host and weights.random() < RENEWED else scenario


def _depth(seed: int, drawn: int | None) -> int | None:
    """Return a depth of 5 to 8 where the deepest was drawn."""
    return random.Random(seed + 11_000_000).choice((5, 6, 7, 8)) if drawn == 8 else drawn


def _renewed(rng: random.Random, scenario: Scenario) -> Scenario:
    """Other weights, before prompts come again whose pages tiers have. Models with more than one kind of weights are
    left out, and so is KV that goes bad."""
    spoils = any(fault.kind == "spoil" for fault in scenario.faults)
    if scenario.grouped or scenario.adapters or spoils:
        return scenario
    turn = rng.randrange(max(job.arrives for job in scenario.jobs) + 1)
    return scenario._replace(faults=(*scenario.faults, Fault("renew", turn)))


def _sizes(rng: random.Random) -> Sizes:
    """A tiny engine: a pool that barely holds one longest sequence, so that pages are always short."""
    rows, page_size, max_len = rng.randrange(1, 6), rng.choice((1, 2, 4, 8)), rng.choice((16, 32, 48))
    pages = 1 + -(-max_len // page_size) + rng.randrange(4)
    queue = rng.choice((2, 8, 8))
    return Sizes(rows, max_len, pages, page_size, rows + rng.randrange(12), queue)


def _jobs(rng: random.Random, max_len: int) -> tuple[Job, ...]:
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_len // 2))] for _ in range(2)]
    jobs, turn = [], 0
    for key in range(rng.randrange(2, 9)):
        turn += rng.choice((0, 0, 1, 3, 9))
        prompt = list(rng.choice(shared)) if rng.random() < 0.6 else []
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_len // 3))]
        if rng.random() < 0.05:
            prompt[rng.randrange(len(prompt))] = NAN_TOKEN
        jobs.append(
            Job(
                key=key,
                arrives=turn,
                prompt=tuple(prompt),
                max_len=min(max_len, len(prompt) + rng.choice((1, 2, 5, 12, 30))),
                stop_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3)))),
                priority=rng.choice((0, 0, 1, -1)),
                salt=rng.choice(("", "", "tenant")),
                leaves=turn + rng.randrange(12) if rng.random() < 0.25 else None,
            )
        )
    return tuple(jobs)


def _again(rng: random.Random, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """The last prompts are earlier ones, and late: a window group has lost pages of theirs that the other still has."""
    *first, last = jobs
    count, turn = max(1, len(first) - 1), last.arrives
    late = []
    for job in (*first[count:], last):
        turn += rng.randrange(16)
        late.append(rng.choice(first[:count])._replace(key=job.key, arrives=turn, leaves=None))
    return *first[:count], *late


def _asking(rng: random.Random, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """In one scenario of six, some ask for log-probabilities. The NaN token has none: no vocabulary holds it."""
    if rng.random() > 1 / 6:
        return jobs
    asks = [(rng.choice((None, 0, 5)), rng.choice((None, 1, 20))) for _ in jobs]
    return tuple(
        job if NAN_TOKEN in job.prompt else job._replace(asks=wanted) for job, wanted in zip(jobs, asks, strict=True)
    )


def _filtering(rng: random.Random, step: str, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """In one scenario of four, some sample with filters. Where rows get several tokens a step, none is scored: such a
    step has the logits of its first token alone. A feature that adds several brings the logits and scores of all."""
    chosen = rng.random() < 0.25
    filters = [rng.choice((0, 1, 2, 3)) if chosen else 0 for _ in jobs]
    return tuple(
        job._replace(filters=wanted, asks=(None, None) if step == "several" else job.asks)
        for job, wanted in zip(jobs, filters, strict=True)
    )


def _biased(rng: random.Random, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Nearly all ask, with biases that prompts may hold. The NaN token has no count: no vocabulary holds it."""
    biases = [rng.randrange(VOCAB) if rng.random() < 0.8 else None for _ in jobs]
    return tuple(
        job if NAN_TOKEN in job.prompt else job._replace(bias=bias) for job, bias in zip(jobs, biases, strict=True)
    )


def _masked(rng: random.Random, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Most have a matcher, and none of these the filter that keeps all of equal tokens."""
    seeds = [rng.randrange(1000) if rng.random() < 0.7 else None for _ in jobs]
    return tuple(
        job if seed is None or NAN_TOKEN in job.prompt else job._replace(automaton=seed, filters=job.filters % 2)
        for job, seed in zip(jobs, seeds, strict=True)
    )


def _adapted(rng: random.Random, scenario: Scenario) -> Scenario:
    """More adapters than slots, for the same prompts; twice as many requests, so that slots change hands."""
    last = scenario.jobs[-1].arrives
    late = [job._replace(key=job.key + 100, arrives=last + rng.randrange(20), leaves=None) for job in scenario.jobs]
    jobs = tuple(job._replace(adapter=rng.choice(("", *NUMBERS))) for job in (*scenario.jobs, *late))
    kinds = rng.choices(("swap", "unload"), k=rng.choice((0, 1, 3)))
    faults = *scenario.faults, *(Fault(kind, rng.randrange(last + 20)) for kind in kinds)
    return scenario._replace(adapters=rng.choice((1, 1, 2)), jobs=jobs, faults=faults)


def _with_host(rng: random.Random, scenario: Scenario) -> Scenario:
    """Copies of a few pages or of all, and requests that come again when others have taken their pages."""
    last, late = scenario.jobs[-1].arrives, []
    if scenario.sizes.slots and any(NAN_TOKEN in job.prompt for job in scenario.jobs):
        return scenario  # a step that counts tokens has no count for it
    for key, job in enumerate((*scenario.jobs, *scenario.jobs), 200):
        last += rng.choice((0, 2, 9, 20))
        late.append(job._replace(key=key, arrives=last, leaves=job.leaves and last + rng.randrange(12)))
    flips = [Fault("flip", rng.randrange(last + 12)) for _ in range(rng.choice((0, 0, 1, 3)))]
    # Where most pages have room, loads meet stores that look for some.
    pages = sum(job.max_len // scenario.sizes.page_size for job in scenario.jobs)
    return scenario._replace(
        host=1 + int(rng.choice((0.0, 0.3, 0.4, 0.5, 0.6, 1.0)) * pages), late_ns=rng.choice((20_000, 10**9, 10**9)),
        jobs=(*scenario.jobs, *late), faults=(*scenario.faults, *flips),
    )  # fmt: skip


def _with_lower(rng: random.Random, scenario: Scenario) -> Scenario:
    """A tier below, that has what the host tier has given up: that one holds a sequence or two, and no more now and
    then."""
    turns = max(job.arrives for job in scenario.jobs) + 12
    rots = [Fault("rot", rng.randrange(turns)) for _ in range(rng.choice((0, 0, 1, 2)))]
    flushes = [Fault("flush", rng.randrange(turns)) for _ in range(rng.randrange(1, 5))]
    if any(fault.kind == "spoil" for fault in scenario.faults):
        # The longest prompt first, and step by step: what is bad of it is stored below before it fails.
        scenario = scenario._replace(depth=1, chain=None, jobs=_longest_first(scenario.jobs))
        flushes = [Fault("flush", turn) for turn in range(12, turns, 12)]
    few = 1 + int(rng.choice((0.5, 1.0, 1.5, 2.0)) * scenario.sizes.max_len / scenario.sizes.page_size)
    return scenario._replace(lower=True, host=few, faults=(*scenario.faults, *rots, *flushes))


def _longest_first(jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """The same arrivals, and the prompts of those that come before the repetitions in the other order."""
    first = [job for job in jobs if job.key < 100]
    turned = [job._replace(key=one.key, arrives=one.arrives) for one, job in zip(first, first[::-1], strict=True)]
    return *turned, *(job for job in jobs if job.key >= 100)


def _pair(rng: random.Random, base: Scenario) -> Scenario:
    """A prefiller and a decoder that are asked for the same prompts, now and then under other names or none."""
    given, taken, mutual = list[Job](), list[Job](), rng.random() < 0.4
    for job in [job for job in base.jobs if job.key < 100]:
        job = job._replace(adapter="", bias=None, automaton=None)
        name = f"r{job.key}"
        if rng.random() < 0.85:
            longest = min(job.max_len, len(job.prompt) + rng.choice((1, 1, 1, 30)))
            leaves = job.arrives + rng.randrange(12) if rng.random() < 0.1 else None
            offer = KVTransfer(offer=name if rng.random() < 0.9 else "")
            given.append(job._replace(max_len=longest, leaves=leaves, transfer=offer))
            if mutual and rng.random() < 0.4:  # the other way round
                later = given[-1].arrives + rng.randrange(9)
                given[-1] = given[-1]._replace(arrives=later, transfer=KVTransfer(claim=name))
                taken.append(job._replace(transfer=offer))
                continue
        names, peers = (name, name, name, name, name, name, "", "r?"), (PEER, PEER, PEER, PEER, "", "", "unix:/no")
        claim = KVTransfer(claim=rng.choice(names), peer=rng.choice(peers))
        taken.append(job._replace(arrives=job.arrives + rng.choice((0, 0, 2, 6, 15, 30)), transfer=claim))
    last = max(job.arrives for job in taken)
    taken += [job._replace(key=job.key + 200, arrives=last + rng.randrange(30), leaves=None) for job in taken]
    given += [job._replace(key=job.key + 200, arrives=last + rng.randrange(30)) for job in given if mutual]
    size, room = rng.choice((1, 2, 4)), rng.choice((0, 3, 20, 60))
    pages = sum(job.max_len // size for job in taken)
    least = 1 + -(-base.sizes.max_len // size)
    return base._replace(
        prefix_caching=True, tier=False, followers=0, adapters=0, lower=False,
        sizes=base.sizes._replace(slots=0, page_size=size, pages=least + room),
        depth=_depth(base.seed, rng.choice((1, 2, 4, 8, base.depth))),
        late_ns=rng.choice((20_000, 10**9, 10**9, 10**9)),
        pair=rng.choice((0.0, 0.03, 0.1)), mutual=mutual, jobs=tuple(taken), given=tuple(given),
        faults=_pair_faults(rng, last + 30, base), given_faults=_pair_faults(rng, last + 30, base),
        host=1 + int(rng.choice((0.1, 0.3, 1.0)) * pages), given_host=1 + int(rng.choice((0.3, 1.0)) * pages),
    )  # fmt: skip


def _pair_faults(rng: random.Random, turns: int, base: Scenario) -> tuple[Fault, ...]:
    """What happens to one engine of a pair; it is started again at once, with nothing of what it had for its peer."""
    rates = {"raise": 0.05, "restart": 0.15, "jump": 0.1, "flip": 0.2, "flush": 0.7, "renew": 0.05}
    if base.grouped:
        del rates["renew"]
    kinds = [kind for kind, rate in rates.items() for _ in range(2) if rng.random() < rate]
    return tuple(Fault(kind, rng.randrange(turns)) for kind in kinds)


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    kinds = [kind for kind, rate in (("raise", 0.1), ("restart", 0.1), ("jump", 0.3)) if rng.random() < rate]
    return tuple(Fault(kind, rng.randrange(25)) for kind in kinds)


def _ranked(rng: random.Random, base: Scenario) -> Scenario:
    """The same for two to four ranks, without what only an engine of one rank has."""
    jobs = tuple(job._replace(adapter="") for job in base.jobs)
    step = "one" if base.step == "several" else base.step
    return base._replace(
        followers=rng.choice((1, 1, 2, 3)), ranks=_rank_faults(rng), step=step, jobs=jobs,
        tier=False, adapters=0, host=0, lower=False,
        faults=tuple(fault for fault in base.faults if fault.kind in ("raise", "restart", "jump")),
    )  # fmt: skip


def _rank_faults(rng: random.Random) -> Faults:
    dies = (rng.randrange(2), rng.randrange(20, 1_000)) if rng.random() < 0.25 else None
    return Faults(rng.choice((0, 0, 20, 100)), rng.choice((1, 3, 16)), rng.choice((0.0, 0.3)), dies)


def _spoiled(scenario: Scenario, rng: random.Random) -> Scenario:
    """One conversation, of which every request is a part, and KV that goes bad on the way.

    Steps are small, so that prompts take many. Nobody leaves or is preempted: the rows that read bad KV hold its pages
    until the first of them fails. No request that is admitted later may fail. Devices and tiers with KV of their own
    are left out.
    """
    rows, page_size, max_len = rng.randrange(5, 8), rng.choice((1, 2, 4)), 48
    direct = continue_grouped if scenario.grouped else continue_prompt
    root = [rng.randrange(VOCAB) for _ in range(rng.randrange(page_size + 1, 9))]
    text = root + direct(root, max_len - len(root), VOCAB)
    turn, jobs = 0, []
    for key, length in enumerate(sorted(rng.choices(range(len(root), max_len), k=6))):
        longest = min(max_len, length + rng.choice((1, 2, 5)))
        jobs.append(Job(key, turn, tuple(text[:length]), longest, (), 0, "", None))
        turn += rng.choice((0, 1, 1, 2))
    sizes = Sizes(rows, max_len, 1 + 2 * rows * -(-max_len // page_size), page_size, rows + rng.randrange(3), 8)
    broken = (fault for fault in scenario.faults if fault.kind not in CHANGES)
    faults = *broken, Fault("spoil", rng.randrange(5))
    return scenario._replace(sizes=sizes, jobs=tuple(jobs), faults=faults, followers=0, adapters=0)
