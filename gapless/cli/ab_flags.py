"""The flags of `gapless ab` that concern the experiment; those of a run are the flags of `gapless bench serve`."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.base.config import flag
from gapless.lab.compare import TESTS

NOT_OURS = frozenset(
    {
        *("base_url", "port", "ready_check_timeout_sec", "num_warmups", "goodput", "probe_request_rate"),
        *("percentile_metrics", "metric_percentiles", "save_detailed", "disable_tqdm"),
    }
)
"""Fields of BenchFlags that mean nothing here."""
_ARMS, _RUNS, _JUDGE = "Arms", "Runs", "Judgement"


@dataclass(frozen=True)
class AbFlags:
    """What is compared, how often, and how it is judged."""

    a_url: str | None = flag(None, "arm A is this server, which runs already", group=_ARMS)
    b_url: str | None = flag(None, "arm B is this server; the same URL as A makes an A/A test", group=_ARMS)
    restart: bool = flag(False, "new servers for every pair of runs, since starts differ too", group=_ARMS)

    runs: int = flag(10, "runs an arm, an even number", group=_RUNS, aliases=("-n",), low=2, high=10_000)
    order: str = flag("abba", "order of the two runs in a pair", group=_RUNS, choices=("abba", "random"))
    warmup_runs: int = flag(1, "whole runs on each arm that do not count", group=_RUNS, low=0, high=1000)
    stop_early: bool = flag(False, "stop when the first metric is decided, at 4 looks at most", group=_RUNS)
    quiet: float = flag(0.1, "begin when at most this share of the processors is busy", group=_RUNS, low=0, high=1)
    quiet_wait: float = flag(60.0, "wait at most this many seconds for that", group=_RUNS, low=0, high=10**6)
    pause: float = flag(0.5, "seconds between two runs", group=_RUNS, low=0, high=10**6)

    metrics: str | None = flag(None, "what to judge, with commas between; default: eight, as the report", group=_JUDGE)
    test: str = flag("crossover", "where p-values come from", group=_JUDGE, choices=TESTS)
    alpha: float = flag(0.05, "chance of a false call in the whole list", group=_JUDGE, low=1e-6, high=0.5)
    fail_if: tuple[str, ...] = flag(
        (),
        "exit with 3 when this holds: worse:1%, tpot:worse:2%, maybe-worse:2%, tokens:differ, requests:failed, differ",
        group=_JUDGE,
    )

    read: str | None = flag(None, "show and judge the JSON of an earlier report; nothing is run", group=_JUDGE)
