"""Known cases, by fixed seeds: how often an A/A is called a difference, and how often a planted 3 % is found.
The noise is that of real runs; bounds are quantiles beyond which one seed in 10,000 lies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from sharpest import sharpest

from gapless.lab.ab_plan import INTERIM_ALPHA, AbFlags
from gapless.lab.compare import ArmRun, Pair, Rules, compare
from gapless.lab.distributions import t_power
from gapless.lab.records import LoadRun
from gapless.lab.significance import crossover, pairs_needed

RARE = 1e-4
KEY = "output_throughput"


def binomial_bounds(n: int, p: float) -> tuple[int, int]:
    """Counts between which a binomial draw is but for RARE on either side."""
    ways = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    chances = [math.exp(way + k * math.log(p) + (n - k) * math.log1p(-p)) for k, way in enumerate(ways)]
    low = high = 0.0
    first = next(k for k, chance in enumerate(chances) if (low := low + chance) > RARE)
    last = next(n - k for k, chance in enumerate(reversed(chances)) if (high := high + chance) > RARE)
    return first, last


def runs(rng: random.Random, noise: float, hiccups: bool = True) -> Iterator[float]:
    """Tokens a second of one run after the other."""
    state, at = 0.0, 0
    drift = rng.gauss(0, noise / 5)
    while True:
        state = 0.9 * state + rng.gauss(0, 2 * noise)
        value = rng.gauss(0, noise) + state + drift * at
        if hiccups and rng.random() < 0.03:
            value -= 6 * noise * rng.random()
        yield 1000.0 * (1 + value)
        at += 1


def arm_run(letter: str, pair: int, first: bool, rate: float) -> ArmRun:
    return ArmRun(letter, pair, first, pair, 0.0, None, None, (), LoadRun((), 1.0), {KEY: rate})


def experiment(rng: random.Random, pairs: int, noise: float, effect: float = 0.0, hiccups: bool = True) -> list[Pair]:
    source = runs(rng, noise, hiccups)
    found = []
    for k in range(pairs):
        first, second = next(source), next(source)
        a, b = (first, second) if k % 2 == 0 else (second, first)
        found.append((arm_run("A", k, k % 2 == 0, a), arm_run("B", k, k % 2 == 1, b * (1 + effect))))
    return found


def sides(pairs: list[Pair]) -> tuple[list[float], list[float], list[bool]]:
    return [a.metrics[KEY] for a, _ in pairs], [b.metrics[KEY] for _, b in pairs], [a.first for a, _ in pairs]


@pytest.mark.seeds
def test_200_aa_runs_are_called_a_difference_in_about_5_percent():
    rng = random.Random(2)
    called = sum(
        compare(experiment(rng, 10, 0.01), [KEY], Rules())[0]["verdict"] in ("better", "worse") for _ in range(200)
    )
    low, high = binomial_bounds(200, 0.05)
    assert low <= called <= high


def _noise_with_memory(rng: random.Random, plan: AbFlags, seed: int) -> tuple[list[float], list[float], list[bool]]:
    state, sides, order = 0.0, ([], []), plan.a_first(seed)
    for a_first in order:
        for second in (False, True):
            state = 0.5 * state + rng.gauss(0, 2)
            sides[a_first == second].append(state + rng.gauss(0, 1))
    return *sides, order


@pytest.mark.seeds
def test_a_drawn_order_holds_its_level_when_the_noise_remembers_some_runs():
    """Strict ABBA then calls a little more than 5 %; a drawn order does not (both are said in the documentation)."""
    rng = random.Random(7)

    def called(order: str) -> int:
        plan = AbFlags(runs=20, order=order)
        return sum(crossover(*_noise_with_memory(rng, plan, seed)).p < 0.05 for seed in range(3000))

    low, high = binomial_bounds(3000, 0.05)
    assert low <= called("random") <= high
    assert high < called("abba") < 0.08 * 3000


@pytest.mark.parametrize("pairs", sharpest([4, 6, 10, 20]))
def test_aa_is_called_as_often_as_the_level_says(pairs):
    rng = random.Random(pairs)
    called = sum(crossover(*sides(experiment(rng, pairs, 0.01, hiccups=False))).p < 0.05 for _ in range(2000))
    low, high = binomial_bounds(2000, 0.05)
    assert low <= called <= high


@pytest.mark.parametrize("alpha", sharpest([0.05, 0.05 / 8]))
def test_a_planted_3_percent_is_found_at_the_n_that_is_predicted(alpha):
    """The spread comes from a long A/A, the number of pairs from the spread, and the share found from fresh runs."""
    noise, effect = 0.01, 0.03
    rng = random.Random(3)
    long = crossover(*sides(experiment(rng, 2000, noise, hiccups=False)))
    spread = long.error * math.sqrt(2000) / 1000
    pairs = pairs_needed(effect, spread, alpha, 0.8)
    assert pairs % 2 or t_power(effect * math.sqrt(pairs) / spread, pairs - 2, alpha) >= 0.8
    pairs += pairs % 2
    expected = t_power(effect * math.sqrt(pairs) / spread, pairs - 2, alpha)
    found = sum(crossover(*sides(experiment(rng, pairs, noise, effect, hiccups=False))).p < alpha for _ in range(1000))
    low, high = binomial_bounds(1000, expected)
    assert expected < 0.95, "at this n nearly everything is found: the prediction is of no use"
    assert low - 15 <= found <= high + 15  # the spread is itself an estimate, to 1.6 %


def _stopping(check: Callable[[list[Pair], int], bool], rng: random.Random, looks: list[int]) -> bool:
    pairs = experiment(rng, looks[-1], 0.01, hiccups=False)
    return any(check(pairs[:look], look) for look in looks)


@pytest.mark.seeds
def test_stopping_early_is_honest_and_looking_without_a_plan_is_not():
    plan = AbFlags(runs=20, stop_early=True)
    assert plan.looks() == [4, 10, 16, 20]
    spent = sum(plan.rules_at(look).alpha for look in plan.looks())
    assert spent == pytest.approx(0.05) and plan.rules_at(4).alpha == INTERIM_ALPHA
    _, high = binomial_bounds(2000, 0.05)

    def honest(pairs: list[Pair], look: int) -> bool:
        return crossover(*sides(pairs)).p < plan.rules_at(look).alpha

    def peeking(pairs: list[Pair], look: int) -> bool:
        return crossover(*sides(pairs)).p < 0.05

    rng = random.Random(6)
    assert sum(_stopping(honest, rng, plan.looks()) for _ in range(2000)) <= high
    assert sum(_stopping(peeking, rng, list(range(4, 21, 2))) for _ in range(2000)) > high
