"""`gapless bench serve`: flags to a plan, the plan to a report, the report to the terminal and a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import gapless
from gapless.base.spellings import did_you_mean
from gapless.cli.bench_flags import DATA_SETS, BenchFlags
from gapless.cli.errors import FAILED, INTERRUPTED_CODE, UsageError
from gapless.cli.flags import Command
from gapless.cli.output import check_writable, make_folder, say, write_text
from gapless.engine.progress import progress
from gapless.hub.names import is_hub_name
from gapless.lab.arrivals import parse_arrivals
from gapless.lab.bench import BenchResult, LoadPlan, bench_serve, raised_priority
from gapless.lab.datasets import Workload
from gapless.lab.http import with_client
from gapless.lab.summary import QUEUE_METRICS, SUMMARY_METRICS, detailed_json, parse_goodput, parse_percentiles
from gapless.lab.target import Target, key_values

DEFAULT_CONCURRENCY = 16
BENCH_EPILOG = """examples:
  gapless bench serve                                          a closed loop against localhost:8000
  gapless bench serve --request-rate 4 --num-prompts 500       Poisson arrivals
  gapless bench serve --backend openai-chat --dataset-name multi_turn --max-concurrency 8
  gapless bench serve --dataset-name timed_trace --dataset-path mooncake.jsonl --goodput ttft:500 tpot:50

Lengths are exact: prompts are token ids if the API takes them, answers run to their length (ignore_eos).
Without --request-rate and --max-concurrency, 16 requests are under way at any time."""


def main(argv: Sequence[str]) -> int:
    command = Command("bench serve", "Measure any OpenAI-compatible server.", (BenchFlags,), greedy=True, words="[URL]")
    command.epilog = BENCH_EPILOG
    command.add_argument("URL", nargs="?", help="the same as --base-url URL")
    command.add_api_key()
    # No GAPLESS_ variables here: GAPLESS_MODEL and its like are meant for a server on this machine.
    settings = command.read(argv, {})
    flags = settings.build(BenchFlags)
    plan = make_plan(flags, settings.api_key)
    key_values(flags.metadata, "--metadata")  # a mistake is reported before the run
    check_out(flags)
    with raised_priority(flags.client_priority) as got:
        bar = partial(progress, wanted=not flags.disable_tqdm)
        report = asyncio.run(with_client(plan.target, partial(bench_serve, plan=plan, say=say, bar=bar)))
    print(report.block())
    for note in report.notes:
        print(f"note: {note}")
    if flags.out:
        save(result_path(flags.out, flags.backend, report.plan), flags, report, got)
    if report.run.interrupted:
        return INTERRUPTED_CODE
    return 0 if report.summary.totals["completed"] else FAILED


def make_plan(flags: BenchFlags, api_key: str = "") -> LoadPlan:
    """Everything that can be checked before the server is asked. Raises ConfigError."""
    work = make_workload(flags)
    metrics = tuple(flags.percentile_metrics.split(","))
    for name in metrics:
        if name not in SUMMARY_METRICS + QUEUE_METRICS:
            known = ", ".join(SUMMARY_METRICS + QUEUE_METRICS)
            raise UsageError(f"--percentile-metrics takes {known} with commas between, got {name!r}")
    closed_loop = flags.max_concurrency is None and flags.request_rate is None and not work.own_times
    return LoadPlan(
        target=make_target(flags, work, api_key),
        work=work,
        arrivals=parse_arrivals(flags.request_rate, flags.burstiness),
        concurrency=DEFAULT_CONCURRENCY if closed_loop else flags.max_concurrency,
        num_warmups=flags.num_warmups,
        ready_seconds=flags.ready_check_timeout_sec,
        fit_lengths=not (flags.input_len or flags.output_len),
        tokenizer=_tokenizer(flags.tokenizer),
        tokenizer_id=flags.tokenizer,
        metrics=metrics,
        percents=parse_percentiles(flags.metric_percentiles),
        goodput=parse_goodput(flags.goodput),
        probe_rate=flags.probe_request_rate,
    )


def _tokenizer(given: str | None) -> str | None:
    if given is None or not is_hub_name(given):
        return given
    from gapless.hub.repo import fetch_tokenizer

    return str(fetch_tokenizer(given))


def make_target(flags: BenchFlags, work: Workload, api_key: str) -> Target:
    planned = work.dataset not in ("custom", "sharegpt")
    return flags.target(
        flags.base_url or f"http://127.0.0.1:{flags.port}",
        flags.model or "",
        api_key,
        {"temperature": flags.temperature},
        endpoint=flags.endpoint or "",
        ignore_eos=planned if flags.ignore_eos is None else flags.ignore_eos,
    )


def make_workload(flags: BenchFlags) -> Workload:
    """The chosen data set with the lengths that were given, and its own defaults for the others."""
    word = flags.dataset_name.replace("-", "_")
    if word not in DATA_SETS:
        known = did_you_mean(word, DATA_SETS) or f"; known are {', '.join(DATA_SETS)}"
        raise UsageError(f"--dataset-name {flags.dataset_name!r} is unknown{known}")
    name, defaults = DATA_SETS[word]
    lengths = {"input_len": flags.input_len, "output_len": flags.output_len, "prefix_len": flags.prefix_len}
    shared = {"prefixes": flags.num_prefixes, "zipf": flags.prefix_zipf}
    given: dict[str, Any] = {key: value for key, value in (lengths | shared).items() if value is not None}
    return Workload(
        dataset=name,
        num_prompts=flags.num_prompts,
        seed=flags.seed,
        path=flags.dataset_path or "",
        range_ratio=flags.range_ratio,
        turns=flags.multi_turn_turns,
        pause=flags.multi_turn_think_sec,
        block=flags.timed_trace_chunk_hash_size,
        seconds_per_tick=flags.timed_trace_sec_multiplier,
        self_timed=flags.request_rate is None,
        shuffle=not flags.disable_shuffle,
        **{**defaults, **given},
    )


def check_out(flags: BenchFlags) -> None:
    """Raises UsageError where --out cannot be written. A folder is made."""
    if not flags.out and flags.save_detailed:
        raise UsageError("--save-detailed needs --out, the file that it adds to")
    if flags.out and _is_folder(flags.out):
        make_folder(flags.out, "--out")
    elif flags.out:
        check_writable(flags.out, "--out")


def _is_folder(out: str) -> bool:
    return out.endswith("/") or Path(out).is_dir()


def result_path(out: str, backend: str, plan: LoadPlan) -> Path:
    """`out` itself, or in a folder a name made of backend, rate, model and date."""
    if not _is_folder(out):
        return Path(out)
    limit = f"-concurrency{plan.concurrency}" if plan.concurrency else ""
    model = plan.target.model.rsplit("/", 1)[-1]
    return Path(out) / f"{backend}-{plan.arrivals.label}{limit}-{model}-{_now()}.json"


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def save(path: Path, flags: BenchFlags, report: BenchResult, priority: str) -> None:
    """Raises UsageError when the file cannot be written."""
    result = {"date": _now(), "gapless_version": gapless.__version__, **report.json()}
    result |= {"backend": flags.backend, "endpoint_type": flags.backend}
    result["client"]["priority"] = priority
    result |= dict(key_values(flags.metadata, "--metadata"))
    if flags.save_detailed:
        result |= detailed_json(report.summary, report.run)
    write_text(path, json.dumps(result) + "\n", "--out", append=path.suffix == ".jsonl")
    say(f"wrote {path}")
