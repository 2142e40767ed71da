"""The plan of `gapless ab`: the two sides, their load, the number of runs, and the judgement."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from gapless.base.config import check_fields, flag
from gapless.base.errors import ConfigError
from gapless.lab.arms import Arm
from gapless.lab.bench import LoadPlan
from gapless.lab.compare import JUDGED, METRICS, TESTS, Rules

INTERIM_ALPHA = 0.001
"""Error probability of each look before the last (Haybittle and Peto)."""
_arms, _runs, _judge = (partial(flag, group=group) for group in ("Arms", "Runs", "Judgement"))


@dataclass(frozen=True)
class AbFlags:
    """The sides, the number of runs and the judgement. Fixed before the first run."""

    a_url: str | None = _arms(None, "arm A is this server, which runs already")
    b_url: str | None = _arms(None, "arm B is this server; the same URL as A makes an A/A test")
    restart: bool = _arms(False, "new servers for every pair of runs, since starts differ too")

    runs: int = _runs(10, "runs an arm, an even number", aliases=("-n",), low=2, high=10_000)
    order: str = _runs("abba", "order of the two runs in a pair", choices=("abba", "random"))
    warmup_runs: int = _runs(1, "whole runs on each arm that do not count", low=0, high=1000)
    stop_early: bool = _runs(False, "stop when the first metric is decided, at 4 looks at most")
    quiet: float = _runs(0.1, "begin when at most this share of the processors is busy", low=0, high=1)
    quiet_wait: float = _runs(60.0, "wait at most this many seconds for that", low=0, high=10**6)
    pause: float = _runs(0.5, "seconds between two runs", low=0, high=10**6)

    metrics: str | None = _judge(None, "what to judge, with commas between; default: eight, as the report")
    test: str = _judge("crossover", "where p-values come from", choices=TESTS)
    alpha: float = _judge(0.05, "chance of a false call in the whole list", low=1e-6, high=0.5)
    fail_if: tuple[str, ...] = _judge(
        (),
        "exit with 3 when this holds: worse:1%, tpot:worse:2%, maybe-worse:2%, tokens:differ, requests:failed, differ",
    )

    read: str | None = _judge(None, "show and judge the JSON of an earlier report; nothing is run")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.runs % 2:
            raise ConfigError(f"runs must be an even number (ABBA), got {self.runs}")
        if unknown := [key for key in self.judged if key not in METRICS]:
            raise ConfigError(f"metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}")
        if self.restart and (self.a_url or self.b_url):
            raise ConfigError("restart needs arms given by flags: a server at a URL is not ours to start")
        if self.stop_early and len(self.looks()) * INTERIM_ALPHA >= self.alpha:
            raise ConfigError(f"alpha {self.alpha} is too small to be shared among {len(self.looks())} looks")

    @property
    def judged(self) -> tuple[str, ...]:
        """The metrics of the one family; the first decides whether an experiment may stop early."""
        return tuple(self.metrics.split(",")) if self.metrics else JUDGED

    def a_first(self, seed: int) -> list[bool]:
        """Return, for each pair, whether A runs first.

        "abba" cancels a steady drift exactly. "random" (as many of each) also keeps the chance of a false call at 5 %
        if noise lasts several runs; a strict ABBA makes it 6 or 7 % then.
        """
        order = [pair % 2 == 0 for pair in range(self.runs)]
        if self.order == "random":
            rng = random.Random(seed)
            rng.shuffle(order)
            while any(len(set(order[:look])) < 2 for look in self.looks()):
                rng.shuffle(order)  # a look that has seen one order only could not take its effect out
        return order

    def looks(self) -> list[int]:
        """Numbers of pairs that end in a look at the data."""
        if not self.stop_early:
            return [self.runs]
        quarters = {max(4, 2 * round(self.runs * k / 8)) for k in (1, 2, 3)}
        return [*sorted(look for look in quarters if look < self.runs), self.runs]

    def rules_at(self, pairs: int) -> Rules:
        """Every look spends its part of alpha: by the union bound a false call at any of them stays below alpha."""
        interim = len(self.looks()) - 1
        alpha = INTERIM_ALPHA if pairs < self.runs and interim else self.alpha - interim * INTERIM_ALPHA
        return Rules(self.test, alpha)


class Setup(NamedTuple):
    """An experiment, all of it fixed before the first run."""

    arms: tuple[Arm, Arm]
    load: LoadPlan
    flags: AbFlags = AbFlags()
    priority: str = "none"
    metadata: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
