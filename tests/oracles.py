"""Oracles: requests that a seed draws, an engine for them, and the tokens that each gets whatever the streams do.

`tests/loop/test_depth_oracle.py` plays all of them at every depth, in chains and on threads.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from adapted_checksum import NUMBERS, adapted_loop, expected
from automaton import ASKED, FORCING, Automaton, NativeAutomaton, allowed_after
from direct import ASKS, SETTINGS, Varied, answers_to, bad_words, direct_run, run_directly, sampling_jobs
from grouped_model import GroupedModel, continue_grouped
from harness import VOCAB, Job, WaryModel, captures_at_once, checksum_loop, kernels_for, model_loop, script, sizes
from oracle_drafter import Oracle as RightDrafter
from oracle_drafter import OracleHead, SharingModel, drafted_by_model, numbers_at_random
from scripted_drafter import MOST, Scripted
from torch_processors import PROCESSORS

from gapless.base.params import SamplingParams
from gapless.base.records import REJECTED, Int32s, Request
from gapless.device import AcceleratorDevice, CpuDevice, Device
from gapless.engine.on_device import on_device
from gapless.kernels.suffixes import new_suffixes
from gapless.kernels.views import Recall
from gapless.loop.loop import Loop
from gapless.loop.spec import HostSizes, Sizes
from gapless.model.drafting.suffixes import SuffixLookup
from gapless.pace.draft_gate import Verify
from gapless.step.lanes.adjust import AdjustKey
from gapless.step.speculation import Speculation
from gapless.testing.checksum import ChecksumModel, answer
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice
from gapless.testing.world import Faults, RankDevice, World

MAX_LEN = 48
NO_CHOICE = [asks for asks in ASKS if "allowed_token_ids" not in asks]
"""What may be asked beside a mask: allowed ids might leave no token."""


class Oracle(NamedTuple):
    jobs: Callable[[int], list[Job]]
    loop: Callable[..., Loop]
    """Gets the seed, its jobs, device, sizes, depth, and options."""
    seeds: Sequence[int]
    few: Sequence[int]
    """Seeds among them that reach what the oracle is for."""
    direct: Callable[[Request], list[int]] = direct_run
    reaches: tuple[str, ...] = ("preempted", "cached", "captured")
    """Counts of `tally` that no run of these seeds leaves at 0."""
    holds: Callable[[Counter[str]], bool] = bool
    """Whether a tally is as it should be."""
    sharp: bool = True
    """Whether `make test` plays the few seeds."""
    chains: tuple[tuple[int, int], ...] = ()
    """Lengths of chains, each with the depth beside it."""
    threads: tuple[tuple[int | None, int | None], ...] = ()
    """Depths and lengths of chains on a device with threads."""
    shape: Callable[[int], Sizes] = sizes

    def play(self, seed: int, device: Device, depth: int | None, **options: Any) -> Loop:
        """Run the seed's requests; each gets its tokens, and nothing is held afterwards."""
        jobs = self.jobs(seed)
        make = partial(self.loop, seed, jobs, device, self.shape(seed), depth, **options)
        loop = on_device(device, make) if isinstance(device, AcceleratorDevice) else make()
        if isinstance(device, RankDevice):
            device.world.follow(loop)
        return run_directly(loop, jobs, self.direct)


def play(
    oracle: Oracle,
    seeds: Iterable[int],
    depth: int | None,
    *,
    mood: str | None = None,
    threads: bool = False,
    guarded: Any = None,
    opened: Callable[[int], Device] | None = None,
    **options: Any,
) -> Counter[str]:
    """Play the seeds, the first two under no_sync and the others not if `guarded` is the guard; on devices `opened` for
    each seed, by default simulated ones. Returns their tally."""
    total = Counter[str]()
    for number, seed in enumerate(seeds):
        if opened is not None:
            device = opened(seed)
        else:
            device = CpuDevice(threads=1) if threads else SimDevice(seed * 8 + (depth or 0), mood, seed % 4 == 0)
        counts = Counter[str]()
        with guarded.rest() if guarded is not None and number > 1 else nullcontext():
            loop = oracle.play(seed, device, depth, counts=counts, **options)
        total.update(counts + tally(loop))
        device.close()
    return total


def play_on_ranks(
    oracle: Oracle, seeds: Iterable[int], depth: int | None, count: int, faults: Faults | None = None, **options: Any
) -> Counter[str]:
    """Play the seeds on that many ranks, which must be alike at the end. Returns their tally."""
    total = Counter[str]()
    for seed in seeds:
        world = World(seed * 8 + (depth or 0), count, maps_host=seed % 4 == 0, faults=faults)
        counts = Counter[str]()
        loop = oracle.play(seed, world.device, depth, counts=counts, ranks=world, group=world.group, **options)
        world.check_alike(loop)
        total.update(counts + tally(loop))
        world.device.close()
    return total


def tally(loop: Loop) -> Counter[str]:
    """What a run came to."""
    counters, gate = loop.counters, loop.launcher.gate
    processed = sum(isinstance(key, AdjustKey) and bool(key.processors) for key in loop.launcher.graphs.known)
    found = Counter(
        preempted=loop.planner.preemptions,
        cached=counters.prefix_hits,
        captured=counters.graph_steps,
        chained=counters.chained_steps,
        held=counters.held_rows,
        processed=processed,
        steps=counters.steps,
    )
    if gate is not None:
        drafts = gate.report()
        found.update(drafted=drafts.draft_tokens, accepted=drafts.right)
    if loop.parts.adapters is not None:
        found.update(loads=loop.parts.adapters.slots.loads)
    if loop.parts.transfers is not None:
        moved = loop.parts.transfers.host.counts
        found.update(loaded=moved.loaded, evicted=moved.evicted, refused=moved.refused)
    if (masks := loop.parts.masks) is not None:
        found.update(written=masks.threads.written if masks.threads else masks.report().written)
    return found


class DraftCounts:
    """Counts drafts as they are decided and verified: those beside chunks, and those of rows with matchers."""

    def __init__(self, loop: Loop, counts: Counter[str]) -> None:
        gate = loop.launcher.gate
        assert gate is not None
        self.loop, self.counts = loop, counts
        self._observe, self._beside = gate.observe, gate.decide_beside
        gate.observe, gate.decide_beside = self.observe, self.decide_beside

    def decide_beside(self, *args: Any) -> Verify:
        verify: Verify = self._beside(*args)
        self.counts["beside"] += verify.places > 1
        return verify

    def observe(self, rows: Int32s, tokens: Int32s, verify: Verify) -> None:
        self.counts[f"places {verify.places}"] += 1
        if verify.places > 1:
            self.counts["wrong"] += int((tokens[:, 1:] == REJECTED).any(1).sum())
            masked = np.array([self._masked(row) for row in rows.tolist()], bool) & (tokens[:, 0] != -1)  # no held ones
            self.counts["masked drafted"] += int(np.count_nonzero(tokens[masked, 1:] != -1))
            self.counts["masked accepted"] += int(np.count_nonzero(tokens[masked, 1:] >= 0))
            self.counts["certain"] += sum(map(self._certain, rows[masked].tolist(), tokens[masked].tolist()))
        self._observe(rows, tokens, verify)

    def _certain(self, row: int, tokens: list[int]) -> int:
        """How many of a row's accepted drafts its automaton leaves no choice about, by definition."""
        request = self.loop.requests[int(self.loop.rows.key[row])]
        output = self.loop.rows.settled(row)[len(request.tokens) :].tolist()
        given = [token for token in tokens if token >= 0]
        seed = request.matcher.seed
        return sum(len(allowed_after(seed, [*output, *given[:at]], VOCAB)) == 1 for at in range(len(given) - 1))

    def _masked(self, row: int) -> bool:
        request = self.loop.requests.get(int(self.loop.rows.key[row]))
        return request is not None and request.matcher is not None


# Requests.


def plain_jobs(seed: int) -> list[Job]:
    return script(seed, MAX_LEN)


def adapted_jobs(seed: int) -> list[Job]:
    rng, jobs = random.Random(seed), plain_jobs(seed)
    for job in jobs:
        job.request = job.request._replace(adapter=rng.choice(("", *NUMBERS)))
    return jobs


def asking_jobs(seed: int) -> list[Job]:
    """Requests that nearly all have penalties, biases, allowed ids or bad words."""
    rng, jobs = random.Random(seed), plain_jobs(seed)
    for job in jobs:
        params = SamplingParams(**rng.choice(SETTINGS), **rng.choice((*ASKS, {})), max_tokens=None)
        words = bad_words(rng, params) if params.bad_words else ()
        job.request = job.request._replace(params=params, bad_words=words)
    return jobs


def masked_jobs(seed: int, natives: bool = False, first: int = 0) -> list[Job]:
    """Requests of which about half have a matcher, whose seeds begin with `first`."""
    rng, jobs = random.Random(seed), plain_jobs(seed)
    for job in jobs:
        masked = rng.random() < 0.6
        asks = {"structured_outputs": ASKED} if masked else {}
        params = SamplingParams(**rng.choice(SETTINGS), **rng.choice([*[{}] * 4, *NO_CHOICE]), **asks, max_tokens=None)
        words = bad_words(rng, params) if params.bad_words else ()
        kind = NativeAutomaton if natives and rng.random() < 0.6 else Automaton
        matcher = kind(first + rng.randrange(1000), VOCAB) if masked else None
        job.request = job.request._replace(params=params, bad_words=words, matcher=matcher)
    return jobs


def processed_jobs(seed: int) -> list[Job]:
    """Requests of which about half have processors, some of them with other wishes."""
    rng, jobs = random.Random(seed), plain_jobs(seed)
    for job in jobs:
        wanted = rng.sample(range(3), rng.choice((0, 0, 1, 1, 2, 3)))
        calls = [{"qualname": PROCESSORS[n].name, "args": [rng.choice((8.0, 2.5, 0.0)), 1.5]} for n in wanted]
        asks = rng.choice(({}, {}, *NO_CHOICE))
        masked = {"structured_outputs": ASKED} if rng.random() < 0.2 else {}
        params = SamplingParams(**rng.choice(SETTINGS), **asks, **masked, max_tokens=None, logits_processors=calls)
        words = bad_words(rng, params) if params.bad_words else ()
        job.request = job.request._replace(
            params=params,
            bad_words=words,
            matcher=Automaton(rng.randrange(1000), VOCAB) if masked else None,
            processors=tuple((number, call["args"]) for number, call in zip(wanted, calls, strict=True)),
        )
    return jobs


def repeated_jobs(seed: int) -> list[Job]:
    """Requests that are each asked up to three times, by two tenants."""
    rng, found = random.Random(seed), []
    for job in plain_jobs(seed):
        for again in range(rng.choice((1, 2, 3))):
            request = job.request._replace(key=len(found), salt=rng.choice(("", "other")))
            found.append(Job(request, job.arrives + 12 * again, job.aborts_after if again else None))
    return sorted(found, key=lambda job: job.arrives)


def returning_jobs(seed: int) -> list[Job]:
    """Requests that come again when the first have ended."""
    jobs = plain_jobs(seed)
    again = max(job.arrives for job in jobs) + 30
    for number, job in enumerate(plain_jobs(seed)):
        jobs.append(Job(job.request._replace(key=100 + number), again + 3 * number, job.aborts_after))
    return jobs


# Engines.


def wary(device: Device) -> type[ChecksumModel]:
    """The model that looks at its inputs, where the host can."""
    return ChecksumModel if device.caps.own_memory else WaryModel


def plain_loop(seed, jobs, device, shape, depth, counts=None, **options):
    graphs = captures_at_once(shape) if seed // 8 % 2 else {}
    kind = WaryModel if isinstance(device, SimDevice) else ChecksumModel
    options = {"kernels": kernels_for(seed, device), **graphs, **options}
    by_priority, caching = seed % 3 == 0, seed % 5 != 0
    return checksum_loop(device, shape, depth, kind, by_priority=by_priority, prefix_caching=caching, **options)


def loop_with_adapters(seed, jobs, device, shape, depth, counts=None, **options):
    return adapted_loop(device, shape, depth, kernels=kernels_for(seed, device), **captured(seed, shape), **options)


def varied_loop(seed, jobs, device, shape, depth, counts=None, **options):
    model, kernels = Varied(VOCAB, MAX_LEN), kernels_for(seed, device)
    return loop_of(device, model, shape, depth, kernels=kernels, **captured(seed, shape), **options)


def scripted_loop(seed, jobs, device, shape, depth, counts, errs=None, **options):
    """Drafts are the direct answers, and err; with `errs` None there are none but those that matchers expect."""
    drafter = Scripted.new([] if errs is None else answers_to(jobs), errs or 0.0)
    loop = varied_loop(seed, jobs, device, shape, depth, speculation=Speculation(MOST, drafter, shape.rows), **options)
    DraftCounts(loop, counts)
    return loop


def right_loop(seed, jobs, device, shape, depth, counts, errs=0.0, **options):
    """Drafts are right but for `errs` of them; some seeds run numbers of drafts at random."""
    graphs = captures_at_once(shape) if seed // 8 % 2 else {}
    kind = WaryModel if isinstance(device, SimDevice) else ChecksumModel
    model, drafter = kind(VOCAB, shape.max_len), RightDrafter(VOCAB, MOST, errs)
    head = OracleHead(drafter, model) if seed // 2 % 2 and "ranks" not in options else None
    speculation = Speculation(MOST, None if head else drafter, shape.rows, head)
    loop = model_loop(
        model,
        device,
        shape,
        depth,
        by_priority=seed % 3 == 0,
        prefix_caching=seed % 5 != 0,
        speculation=speculation,
        kernels=kernels_for(seed, device),
        **graphs,
        **options,
    )
    if isinstance(device, SimDevice) and seed % 4 in (1, 2):
        numbers_at_random(seed, loop, speculation)
    DraftCounts(loop, counts)
    return loop


class WarySharing(SharingModel, WaryModel):
    """Shares its memory, and looks at its inputs."""


def draft_model_loop(seed, jobs, device, shape, depth, counts, errs=0.0, **options):
    model = (SharingModel if device.caps.own_memory else WarySharing)(VOCAB, shape.max_len)
    graphs = captures_at_once(shape) if seed % 2 else {}
    loop = model_loop(
        model,
        device,
        shape,
        depth,
        speculation=drafted_by_model(model, MOST, errs, shape.rows),
        **{"kernels": kernels_for(seed, device), "prefix_caching": seed % 5 != 0, **graphs, **options},
    )
    DraftCounts(loop, counts)
    return loop


HOST = torch.device("cpu")


def suffix_lookup(entries: int = 1 << 10, at: torch.device = HOST) -> SuffixLookup:
    return SuffixLookup(8, Recall(MOST, 1000, 100), new_suffixes(3, entries, at))


def by_suffixes(suffixes: SuffixLookup, rows: int) -> Speculation:
    return Speculation(suffixes.asked.most, suffixes, rows, learner=suffixes.learn)


def suffix_loop(seed, jobs, device, shape, depth, counts=None, **options):
    # A table of 8 entries is taken over again and again.
    suffixes = suffix_lookup(1 << (3 if seed % 5 == 0 else 10), device.torch_device)
    graphs = captures_at_once(shape) if seed % 2 else {}
    return model_loop(
        wary(device)(VOCAB, shape.max_len),
        device,
        shape,
        depth,
        kernels=kernels_for(seed, device),
        prefix_caching=seed % 7 != 0,
        speculation=by_suffixes(suffixes, shape.rows),
        **graphs,
        **options,
    )


def grouped_loop(seed, jobs, device, shape, depth, counts=None, **options):
    graphs = captures_at_once(shape) if isinstance(device, CpuDevice) else {}
    return model_loop(
        GroupedModel(VOCAB, shape.max_len), device, shape, depth, kernels=kernels_for(seed, device), **graphs, **options
    )


def hosted_loop(seed, jobs, device, shape, depth, counts=None, **options):
    late_ns = 20_000 if depth in (2, 8) else 10**9
    host = HostSizes((1, 4, 40)[seed // 4 % 3] * 4096, 1, late_ns)
    return checksum_loop(device, shape, depth, wary(device), host=host, kernels=kernels_for(seed, device), **options)


def small_pages(seed: int) -> Sizes:
    """Pages of two tokens in a pool that barely holds one longest sequence: those of a window are soon another's."""
    shape = sizes(seed)
    return shape._replace(page_size=2, pages=2 + shape.max_len // 2 + seed % 4)


def captured(seed: int, shape: Sizes) -> dict[str, Any]:
    return captures_at_once(shape) if seed % 3 else {}


# Tokens.


def direct_plain(request: Request) -> list[int]:
    return answer(request, VOCAB)


def direct_grouped(request: Request) -> list[int]:
    prompt = request.tokens.tolist()
    tokens = continue_grouped(prompt, request.max_len - len(prompt), VOCAB)
    ends = (index + 1 for index, token in enumerate(tokens) if token in request.stop_ids)
    return tokens[: next(ends, len(tokens))]


CHAINS = ((2, 4), (8, 4))
THREADS = ((1, None), (4, None), (None, None))
PLAIN = Oracle(
    plain_jobs,
    plain_loop,
    range(96),
    range(16),
    direct_plain,
    ("preempted", "captured"),
    chains=((2, 1), (4, 2), (8, 3)),
    threads=((1, 1), (2, 1), (4, 1), (8, 1), (None, None), (1, 4), (None, 8)),
)
ADAPTED = Oracle(
    adapted_jobs,
    loop_with_adapters,
    range(500, 524),
    range(500, 504),
    expected,
    ("preempted", "cached", "captured", "loads"),
    chains=CHAINS,
    threads=THREADS,
)
ASKING = Oracle(asking_jobs, varied_loop, range(100, 116), range(100, 104), chains=CHAINS, threads=THREADS)
MASKED = Oracle(masked_jobs, varied_loop, range(100, 116), range(100, 104), chains=CHAINS, threads=THREADS)
NATIVE = MASKED._replace(jobs=partial(masked_jobs, natives=True))
PROCESSED = Oracle(
    processed_jobs,
    partial(varied_loop, processors=PROCESSORS),
    range(100, 108),
    range(100, 104),
    reaches=("captured", "processed"),
    chains=CHAINS,
    threads=THREADS,
)
SAMPLED = Oracle(sampling_jobs, varied_loop, range(10), (0, 3, 4), reaches=("preempted",))
GROUPED = Oracle(
    plain_jobs,
    grouped_loop,
    range(24),
    range(4),
    direct_grouped,
    ("preempted",),
    threads=((1, None), (4, None)),
    shape=small_pages,
)
HOSTED = Oracle(
    returning_jobs,
    hosted_loop,
    range(24),
    (4, 8, 9, 10),
    direct_plain,
    ("preempted", "loaded", "evicted"),
    lambda counts: not counts["refused"],
)
SUFFIXES = Oracle(
    repeated_jobs, suffix_loop, range(16), (0, 5, 8, 13), direct_plain, ("preempted", "captured", "drafted", "accepted")
)


def accepted_share(least: float, most: float) -> Callable[[Counter[str]], bool]:
    return lambda counts: least * counts["drafted"] <= counts["accepted"] <= most * counts["drafted"]


def right_drafts(errs: float, least: float, most: float) -> Oracle:
    reaches = ("preempted", "captured", "drafted", "beside", "places 3", "places 5")
    return Oracle(
        plain_jobs,
        partial(right_loop, errs=errs),
        range(16),
        (1, 2, 9, 14),
        direct_plain,
        reaches,
        accepted_share(least, most),
        errs == 0.3,
        threads=((1, None), (4, None)),
    )


def scripted_drafts(errs: float, least: float, most: float) -> Oracle:
    """Beside penalties, biases and filters."""
    return Oracle(
        sampling_jobs,
        partial(scripted_loop, errs=errs),
        range(8),
        (0, 1, 3, 4),
        direct_run,
        ("drafted", "beside"),
        accepted_share(least, most),
        errs == 0.3,
    )


def model_drafts(errs: float) -> Oracle:
    reaches = ("preempted", "cached", "captured", "drafted", "beside", "wrong" if errs else "accepted")
    return Oracle(
        plain_jobs,
        partial(draft_model_loop, errs=errs),
        (*range(8), 11),
        (0, 3, 5, 11),
        direct_plain,
        reaches,
        lambda counts: bool(counts["wrong"]) == (errs > 0),
        errs == 0.3,
    )


def masked_drafts(errs: float | None, natives: bool = False) -> Oracle:
    """Rows with matchers; with `errs` None the matchers mostly allow one token."""
    jobs = partial(masked_jobs, natives=natives, first=FORCING if errs is None else 0)

    def holds(counts: Counter[str]) -> bool:
        drafted, accepted, certain = (counts[name] for name in ("masked drafted", "masked accepted", "certain"))
        # Of most wrong drafts the masks say so before: these are not verified. A matcher's only token is always right.
        if errs is None:
            return drafted == accepted == certain
        return drafted > accepted == certain if errs == 1.0 else (accepted < drafted) == (errs > 0)

    return Oracle(
        jobs,
        partial(scripted_loop, errs=errs),
        range(100, 108),
        (104, 105, 106),
        direct_run,
        ("masked drafted",),
        holds,
        errs in (0.3, None),
        chains=CHAINS if errs == 0.3 else (),
        threads=THREADS if errs in (0.3, None) else (),
    )


DRAFTS_BESIDE_PROCESSORS = Oracle(
    processed_jobs,
    partial(scripted_loop, errs=0.2, processors=PROCESSORS),
    range(500, 506),
    (500, 501, 502),
    reaches=("processed", "accepted"),
    sharp=False,
)
ORACLES = {
    "plain": PLAIN,
    "adapters": ADAPTED,
    "wishes": ASKING,
    "masks": MASKED,
    "processors": PROCESSED,
    "sampling": SAMPLED,
    "drafts beside processors": DRAFTS_BESIDE_PROCESSORS,
    "page groups": GROUPED,
    "host tier": HOSTED,
    "suffixes": SUFFIXES,
    "right drafts": right_drafts(0.0, 0.95, 1.0),
    "erring drafts": right_drafts(0.3, 0.3, 0.8),
    "wrong drafts": right_drafts(1.0, 0.0, 0.01),  # a stale draft may be right by chance
    "right drafts beside wishes": scripted_drafts(0.0, 0.8, 1.0),
    "erring drafts beside wishes": scripted_drafts(0.3, 0.3, 0.8),
    "wrong drafts beside wishes": scripted_drafts(1.0, 0.0, 0.05),
    "right draft model": model_drafts(0.0),
    "erring draft model": model_drafts(0.3),
    "wrong draft model": model_drafts(1.0),
    "right masked drafts": masked_drafts(0.0),
    "erring masked drafts": masked_drafts(0.3),
    "wrong masked drafts": masked_drafts(1.0),
    "certain drafts": masked_drafts(None),
}
