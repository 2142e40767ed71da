"""`gapless ab`: two arms, one driven at a time, in the order AB, BA, AB, BA, ...; then the judgement."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.lab import environment
from gapless.lab.arms import LETTERS, Arm, Live, live
from gapless.lab.bench import LoadPlan
from gapless.lab.compare import JUDGED, METRICS, Rules, compare
from gapless.lab.paired_load import PairedLoad, Played
from gapless.lab.report import ArmRun, Experiment, build_report, pairs_of
from gapless.lab.same_tokens import compare_tokens

INTERIM_ALPHA = 0.001
"""What each look before the last may spend (Haybittle and Peto)."""
WARM_UP_PAIR = 1_000_000
"""Number of the warm-up pair, so that its seed is far from those of the pairs that count."""
Tell = Callable[[str], None]


class Setup(NamedTuple):
    """An experiment, all of it fixed before the first run."""

    arms: tuple[Arm, Arm]
    load: LoadPlan
    pairs: int = 10
    metrics: tuple[str, ...] = JUDGED
    """Judged, in one family; the first decides whether an experiment may stop early."""
    rules: Rules = Rules()
    order: str = "abba"
    order_seed: int = 0
    stop_early: bool = False
    restart: bool = False
    """New servers for every pair, so that what differs from one start to the next is noise and no difference."""
    warm_up_runs: int = 1
    quiet: float = 0.1
    quiet_seconds: float = 60.0
    pause: float = 0.5
    """Seconds between two runs: a server may spin for a moment after its last request."""
    start_seconds: float = 600.0
    priority: str = "none"
    metadata: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()

    def check(self) -> Setup:
        """Itself. Raises ConfigError."""
        if self.pairs < 2 or self.pairs % 2:
            raise ConfigError(f"runs must be an even number, 2 at least (ABBA), got {self.pairs}")
        if unknown := [key for key in self.metrics if key not in METRICS]:
            raise ConfigError(f"metrics: {unknown[0]!r} is not one of {', '.join(METRICS)}")
        if self.restart and any(arm.url for arm in self.arms):
            raise ConfigError("restart needs arms given by flags: a server at a URL is not ours to start")
        if self.stop_early and len(self.looks()) * INTERIM_ALPHA >= self.rules.alpha:
            raise ConfigError(f"alpha {self.rules.alpha} is too small to be shared among {len(self.looks())} looks")
        return self

    def a_first(self) -> list[bool]:
        """Return, for each pair, whether A runs first.

        "abba" cancels a steady drift exactly. "random" (as many of each) also keeps the chance of a false call at 5 %
        if noise lasts several runs; a strict ABBA makes it 6 or 7 % then.
        """
        order = [pair % 2 == 0 for pair in range(self.pairs)]
        if self.order == "random":
            rng = random.Random(self.order_seed)
            rng.shuffle(order)
            while any(len(set(order[:look])) < 2 for look in self.looks()):
                rng.shuffle(order)  # a look that has seen one order only could not take its effect out
        return order

    def looks(self) -> list[int]:
        """Numbers of pairs after which the data are judged."""
        if not self.stop_early:
            return [self.pairs]
        quarters = {max(4, 2 * round(self.pairs * k / 8)) for k in (1, 2, 3)}
        return [*sorted(look for look in quarters if look < self.pairs), self.pairs]

    def rules_at(self, pairs: int) -> Rules:
        """Every look spends its part of alpha: by the union bound a false call at any of them stays below alpha."""
        interim = len(self.looks()) - 1
        alpha = INTERIM_ALPHA if pairs < self.pairs and interim else self.rules.alpha - interim * INTERIM_ALPHA
        return self.rules._replace(alpha=alpha)


def run_experiment(setup: Setup, tell: Tell) -> dict[str, Any]:
    """Start what is to be started, run everything, judge, and return the report (see gapless.lab.report).

    Raises:
        ConfigError: the plan contradicts itself. ArmError, ServerError: a server does not start or answer.
    """
    setup.check()
    began = time.monotonic()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    load = PairedLoad(setup.load, setup.arms, setup.priority)
    runs: list[ArmRun] = []
    for first, last in _sittings(setup):
        with _servers(setup, load, tell) as servers:
            for pair in range(first, last):
                runs += _pair(setup, load, servers, pair, began, tell)
                if _decided(setup, runs, pair + 1):
                    break
        if _decided(setup, runs, len(runs) // 2):
            tell(f"decided after {len(runs) // 2} of {setup.pairs} pairs")
            break
    return judge(setup, load.described(), runs, servers, created)


def judge(
    setup: Setup, workload: Mapping[str, Any], runs: Sequence[ArmRun], servers: tuple[Live, Live], created: str
) -> dict[str, Any]:
    """The report of runs that were made."""
    pairs = pairs_of(runs)
    rules = setup.rules_at(len(pairs))
    done = Experiment(
        setup.metrics, setup.arms, servers, workload, tuple(runs), setup.load.work.seed, setup.pairs, setup.looks(),
        environment.describe_host(), created, setup.command, setup.quiet, dict(setup.metadata),
    )  # fmt: skip
    return build_report(done, compare(pairs, setup.metrics, rules), rules, compare_tokens(_answers(runs)))


def _sittings(setup: Setup) -> list[tuple[int, int]]:
    """(first pair, one past the last) between two starts of the servers."""
    if setup.restart:
        return [(pair, pair + 1) for pair in range(setup.pairs)]
    return [(0, setup.pairs)]


@contextmanager
def _servers(setup: Setup, load: PairedLoad, tell: Tell) -> Iterator[tuple[Live, Live]]:
    """Both servers up, asked and warm."""
    with ExitStack() as stack:
        up = []
        for arm in setup.arms:
            tell(f"{arm.letter}: {'at' if arm.url else 'starting with'} {arm.name}")
            up.append(stack.enter_context(live(arm, setup.start_seconds)))
        servers = (up[0], up[1])
        load.meet(servers)
        for run in range(setup.warm_up_runs):
            for which in range(len(LETTERS)):
                load.play(which, WARM_UP_PAIR + run)
        yield servers


def _pair(
    setup: Setup, load: PairedLoad, servers: Sequence[Live], pair: int, began: float, tell: Tell
) -> Iterator[ArmRun]:
    order = (0, 1) if setup.a_first()[pair] else (1, 0)
    for arm in order:
        time.sleep(setup.pause)
        busy = environment.wait_until_quiet(setup.quiet, setup.quiet_seconds)
        average, gpus, at = environment.load_average(), environment.gpu_states(), time.monotonic() - began
        played = load.play(arm, pair)
        letter = LETTERS[arm]
        tell(f"pair {pair + 1}/{setup.pairs} {letter}: {_in_short(played)}, busy before {busy}")
        yield ArmRun(
            letter, pair, arm == order[0], load.seed(pair), at, busy, average, gpus, played.load, played.metrics,
            played.notes,
        )  # fmt: skip


def _in_short(played: Played) -> str:
    failed = sum(bool(sample.error) for sample in played.load.samples)
    rate = played.metrics["output_throughput"]
    return f"{rate:.0f} tokens/s in {played.load.duration:.1f} s" + (f", {failed} failed" if failed else "")


def _decided(setup: Setup, runs: Sequence[ArmRun], pairs: int) -> bool:
    """Return whether an interim look calls the first metric at its share of alpha."""
    if pairs not in setup.looks()[:-1]:
        return False
    rows = compare(pairs_of(runs), setup.metrics, setup.rules_at(pairs))
    return bool(rows) and rows[0].metric.key == setup.metrics[0] and rows[0].verdict in ("better", "worse")


def _answers(runs: Sequence[ArmRun]) -> list[tuple[int, Any, Any]]:
    by_pair: dict[int, dict[str, ArmRun]] = {}
    for run in runs:
        by_pair.setdefault(run.pair, {})[run.letter] = run
    whole = [sides for _, sides in sorted(by_pair.items()) if len(sides) == len(LETTERS)]
    return [(sides["A"].seed, sides["A"].load.samples, sides["B"].load.samples) for sides in whole]
