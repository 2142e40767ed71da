"""`gapless ab`: two arms, one driven at a time, in the order AB, BA, AB, BA, ...; then the judgement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from gapless.lab import environment
from gapless.lab.ab_plan import Setup
from gapless.lab.arms import LETTERS, Live, live
from gapless.lab.bench import BenchResult, Say
from gapless.lab.compare import ArmRun, compare
from gapless.lab.paired_load import PairedLoad
from gapless.lab.report import judge, pairs_of
from gapless.lab.summary import figures

WARM_UP_PAIR = 1_000_000
"""Number of the warm-up pair, so that its seed is far from the counted pairs' seeds."""


def run_experiment(setup: Setup, tell: Say) -> dict[str, Any]:
    """Start the servers, run everything, judge, and return the report (see gapless.lab.report).

    Raises ConfigError for a request that does not fit into a model, ArmError or ServerError for a server.
    """
    began = time.monotonic()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    load = PairedLoad(setup.load, setup.priority)
    runs: list[ArmRun] = []
    with ExitStack() as stack:
        for pair in range(setup.flags.runs):
            if pair == 0 or setup.flags.restart:
                stack.close()
                servers = _start(setup, load, stack, tell)
            runs += _pair(setup, load, servers, pair, began, tell)
            if _decided(setup, runs, pair + 1):
                tell(f"decided after {pair + 1} of {setup.flags.runs} pairs")
                break
    return judge(setup, load.described(), runs, servers, created)


def _start(setup: Setup, load: PairedLoad, stack: ExitStack, tell: Say) -> tuple[Live, Live]:
    """Both servers up, asked and warm, until `stack` closes."""
    up = []
    for arm in setup.arms:
        tell(f"{arm.letter}: {'at' if arm.url else 'starting with'} {arm.name}")
        up.append(stack.enter_context(live(arm)))
    servers = (up[0], up[1])
    asyncio.run(load.meet(servers))
    for run in range(setup.flags.warmup_runs):
        for which in (0, 1):
            load.play(which, WARM_UP_PAIR + run)
    return servers


def _pair(
    setup: Setup, load: PairedLoad, servers: Sequence[Live], pair: int, began: float, tell: Say
) -> Iterator[ArmRun]:
    flags = setup.flags
    order = (0, 1) if flags.a_first(setup.load.work.seed)[pair] else (1, 0)
    for arm in order:
        time.sleep(flags.pause)
        busy = environment.wait_until_quiet(flags.quiet, flags.quiet_wait)
        average, gpus, at = environment.load_average(), environment.gpu_states(), time.monotonic() - began
        result = load.play(arm, pair)
        tell(f"pair {pair + 1}/{flags.runs} {LETTERS[arm]}: {_in_short(result)}, busy before {busy}")
        made = result.run, figures(result.summary), result.notes
        yield ArmRun(LETTERS[arm], pair, arm == order[0], load.seed(pair), at, busy, average, gpus, *made)


def _in_short(result: BenchResult) -> str:
    totals = result.summary.totals
    failed = f", {totals['failed']} failed" if totals["failed"] else ""
    return f"{totals['output_throughput']:.0f} tokens/s in {totals['duration']:.1f} s{failed}"


def _decided(setup: Setup, runs: Sequence[ArmRun], pairs: int) -> bool:
    """Return whether an interim look calls the first metric at its share of alpha."""
    if pairs not in setup.flags.looks()[:-1]:
        return False
    judged = setup.flags.judged
    rows = compare(pairs_of(runs), judged, setup.flags.rules_at(pairs))
    return bool(rows) and rows[0]["key"] == judged[0] and rows[0]["verdict"] in ("better", "worse")
