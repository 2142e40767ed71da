"""`gapless ab`: two arms, one driven at a time, in the order AB, BA, AB, BA, ...; then the judgement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any

from gapless.lab import environment
from gapless.lab.ab_plan import Setup
from gapless.lab.arms import LETTERS, Live, live
from gapless.lab.compare import compare
from gapless.lab.paired_load import PairedLoad, Played
from gapless.lab.report import ArmRun, judge, pairs_of

WARM_UP_PAIR = 1_000_000
"""Number of the warm-up pair, so that its seed is far from those of the pairs that count."""
START_SECONDS = 600.0
Tell = Callable[[str], None]


def run_experiment(setup: Setup, tell: Tell) -> dict[str, Any]:
    """Start what is to be started, run everything, judge, and return the report (see gapless.lab.report).

    Raises:
        ConfigError: a request does not fit into a model. ArmError, ServerError: a server does not start or answer.
    """
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
            tell(f"decided after {len(runs) // 2} of {setup.flags.runs} pairs")
            break
    return judge(setup, load.described(), runs, servers, created)


def _sittings(setup: Setup) -> list[tuple[int, int]]:
    """(first pair, one past the last) between two starts of the servers."""
    runs = setup.flags.runs
    return [(pair, pair + 1) for pair in range(runs)] if setup.flags.restart else [(0, runs)]


@contextmanager
def _servers(setup: Setup, load: PairedLoad, tell: Tell) -> Iterator[tuple[Live, Live]]:
    """Both servers up, asked and warm."""
    with ExitStack() as stack:
        up = []
        for arm in setup.arms:
            tell(f"{arm.letter}: {'at' if arm.url else 'starting with'} {arm.name}")
            up.append(stack.enter_context(live(arm, START_SECONDS)))
        servers = (up[0], up[1])
        load.meet(servers)
        for run in range(setup.flags.warmup_runs):
            for which in range(len(LETTERS)):
                load.play(which, WARM_UP_PAIR + run)
        yield servers


def _pair(
    setup: Setup, load: PairedLoad, servers: Sequence[Live], pair: int, began: float, tell: Tell
) -> Iterator[ArmRun]:
    flags = setup.flags
    order = (0, 1) if flags.a_first(setup.load.work.seed)[pair] else (1, 0)
    for arm in order:
        time.sleep(flags.pause)
        busy = environment.wait_until_quiet(flags.quiet, flags.quiet_wait)
        average, gpus, at = environment.load_average(), environment.gpu_states(), time.monotonic() - began
        played = load.play(arm, pair)
        tell(f"pair {pair + 1}/{flags.runs} {LETTERS[arm]}: {_in_short(played)}, busy before {busy}")
        yield ArmRun(LETTERS[arm], pair, arm == order[0], load.seed(pair), at, busy, average, gpus, *played)


def _in_short(played: Played) -> str:
    failed = sum(bool(sample.error) for sample in played.load.samples)
    rate = played.metrics["output_throughput"]
    return f"{rate:.0f} tokens/s in {played.load.duration:.1f} s" + (f", {failed} failed" if failed else "")


def _decided(setup: Setup, runs: Sequence[ArmRun], pairs: int) -> bool:
    """Return whether an interim look calls the first metric at its share of alpha."""
    if pairs not in setup.flags.looks()[:-1]:
        return False
    judged = setup.flags.judged
    rows = compare(pairs_of(runs), judged, setup.flags.rules_at(pairs))
    return bool(rows) and rows[0].metric.key == judged[0] and rows[0].verdict in ("better", "worse")
