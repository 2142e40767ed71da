"""`gapless bench serve`: flags to a plan, the plan to a report, the report to the terminal and a file."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import gapless
from gapless.cli.bench_flags import BACKENDS, DATASET_NAMES, BenchFlags
from gapless.cli.errors import FAILED, UsageError
from gapless.cli.flags import Command, nearest
from gapless.cli.keys import add_api_key, api_key
from gapless.cli.output import check_writable, make_folder, write_text
from gapless.hub.names import is_hub_name
from gapless.lab.arrivals import Arrivals, Ramp
from gapless.lab.bench import Plan, Report, bench_serve, raise_priority
from gapless.lab.progress import progress
from gapless.lab.summary import METRICS, QUEUE_METRICS, detailed_json, parse_goodput, parse_percentiles
from gapless.lab.target import Target
from gapless.lab.workload import Workload

DEFAULT_CONCURRENCY = 16
EPILOG = """examples:
  gapless bench serve                                          a closed loop against localhost:8000
  gapless bench serve --request-rate 4 --num-prompts 500       Poisson arrivals
  gapless bench serve --backend openai-chat --dataset-name multi_turn --max-concurrency 8
  gapless bench serve --dataset-name timed_trace --dataset-path mooncake.jsonl --goodput ttft:500 tpot:50

Lengths are exact: prompts are token ids where the API takes them, answers run to their length (ignore_eos).
Without --request-rate, --max-concurrency and a ramp, 16 requests are under way at any time."""


def main(argv: Sequence[str]) -> int:
    command = Command("bench serve", "Measure any OpenAI-compatible server.", (BenchFlags,), greedy=True)
    command.epilog = EPILOG
    add_api_key(command)
    # No GAPLESS_ variables here: GAPLESS_MODEL and its like are meant for a server on this machine.
    settings = command.read(argv, {})
    flags = settings.build(BenchFlags)
    plan = make_plan(flags, api_key(settings.options))
    key_values(flags.metadata, "--metadata")  # told before the run and not after it
    # A file that was named, or more detail of it, was wanted.
    wanted = bool(flags.save_result or flags.append_result or flags.save_detailed or flags.result_filename)
    path = result_path(flags) if wanted else None
    got = raise_priority(flags.client_priority)
    report = asyncio.run(
        bench_serve(plan, _say, lambda what, total: progress(what, total, wanted=not flags.disable_tqdm))
    )
    print(report.block())
    for note in report.notes:
        print(f"note: {note}")
    if wanted:
        save(path or default_name(flags, report.plan), flags, report, got)
    return 0 if report.summary.completed else FAILED


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_plan(flags: BenchFlags, api_key: str = "") -> Plan:
    """Everything that can be checked before the server is asked. Raises ConfigError."""
    work = make_workload(flags)
    metrics = tuple(flags.percentile_metrics.split(","))
    for name in metrics:
        if name not in METRICS + QUEUE_METRICS:
            known = ", ".join(METRICS + QUEUE_METRICS)
            raise UsageError(f"--percentile-metrics takes {known} with commas between, got {name!r}")
    return Plan(
        target=make_target(flags, work, api_key),
        work=work,
        arrivals=make_arrivals(flags),
        concurrency=_concurrency(flags, work),
        num_warmups=flags.num_warmups,
        ready_seconds=flags.ready_check_timeout_sec,
        fit_lengths=not any((flags.input_len, flags.output_len, flags.random_input_len, flags.random_output_len)),
        vocab_size=flags.vocab_size,
        tokenizer=_tokenizer(flags.tokenizer),
        tokenizer_id=flags.tokenizer,
        metrics=metrics,
        percents=parse_percentiles(flags.metric_percentiles),
        goodput=parse_goodput(flags.goodput),
        profile=flags.profile,
        probe_rate=flags.probe_request_rate,
    )


def _tokenizer(given: str | None) -> str | None:
    if given is None or not is_hub_name(given):
        return given
    from gapless.hub.repo import fetch_tokenizer

    return str(fetch_tokenizer(given))


def make_target(flags: BenchFlags, work: Workload, api_key: str) -> Target:
    planned = work.dataset not in ("custom", "sharegpt")
    named = {"top_p": flags.top_p, "top_k": flags.top_k, "min_p": flags.min_p}
    sampling = {"temperature": flags.temperature, **{k: v for k, v in named.items() if v is not None}}
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    return Target(
        base_url=flags.base_url or f"http://{host}:{flags.port}",
        model=flags.served_model_name or flags.model or "",
        api_key=api_key,
        backend=BACKENDS[flags.backend],
        endpoint=flags.endpoint or "",
        extra_body={**sampling, **extra_body(flags.extra_body)},
        headers=tuple(key_values(flags.header, "--header")),
        ignore_eos=planned if flags.ignore_eos is None else flags.ignore_eos,
        insecure=flags.insecure,
    )


def extra_body(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--extra-body must be a JSON object, got {text}")
    return value


def key_values(items: Sequence[str], flag: str) -> list[tuple[str, str]]:
    for item in items:
        if not item.partition("=")[1]:
            raise UsageError(f"{flag} takes KEY=VALUE, got {item!r}")
    return [(key.strip(), value.strip()) for key, _, value in (item.partition("=") for item in items)]


def make_workload(flags: BenchFlags) -> Workload:
    """The flags that belong to the chosen data set."""
    word = flags.dataset_name.replace("-", "_")
    if word not in DATASET_NAMES:
        near = nearest(word, DATASET_NAMES)
        known = f"did you mean {near}?" if near else f"known are {', '.join(DATASET_NAMES)}"
        raise UsageError(f"--dataset-name {flags.dataset_name!r} is unknown; {known}")
    name = DATASET_NAMES[word]
    shared: dict[str, Any] = {}
    output: int | None = flags.random_output_len
    if name == "prefix_repetition":
        output = flags.prefix_repetition_output_len
        shared = {"prefixes": flags.prefix_repetition_num_prefixes, "shared_len": flags.prefix_repetition_prefix_len}
        shared |= {"suffix_len": flags.prefix_repetition_suffix_len}
    elif name == "shared_prefix":
        output = flags.shared_prefix_output_len
        shared = {"prefixes": flags.shared_prefix_num_groups, "shared_len": flags.shared_prefix_len}
        shared |= {"suffix_len": flags.shared_prefix_question_len, "zipf": flags.shared_prefix_zipf}
    elif name == "custom":
        output = flags.custom_output_len
    return Workload(
        dataset=name,
        num_prompts=flags.num_prompts,
        seed=flags.seed,
        path=flags.dataset_path or "",
        input_len=flags.input_len or flags.random_input_len or 1024,
        output_len=flags.output_len or output or 128,
        range_ratio=flags.random_range_ratio,
        prefix_len=flags.random_prefix_len,
        turns=flags.multi_turn_turns,
        pause=flags.multi_turn_think_sec,
        burst_size=flags.burst_size,
        burst_interval=flags.burst_interval,
        sharegpt_output_len=flags.output_len or flags.sharegpt_output_len,
        block=flags.timed_trace_chunk_hash_size,
        seconds_per_tick=flags.timed_trace_sec_multiplier,
        self_timed=flags.self_timed,
        shuffle=not flags.disable_shuffle,
        oversample=not flags.no_oversample,
        **shared,
    )


def make_arrivals(flags: BenchFlags) -> Arrivals:
    ramp = None
    if flags.ramp_up_strategy is not None:
        if flags.ramp_up_start_rps is None or flags.ramp_up_end_rps is None:
            raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        ramp = Ramp(flags.ramp_up_strategy, flags.ramp_up_start_rps, flags.ramp_up_end_rps)
    rate = math.inf if flags.request_rate is None else flags.request_rate
    return Arrivals(rate, flags.burstiness, ramp)


def _concurrency(flags: BenchFlags, work: Workload) -> int | None:
    if flags.max_concurrency or flags.request_rate is not None or flags.ramp_up_strategy or work.own_times:
        return flags.max_concurrency
    return DEFAULT_CONCURRENCY


def result_path(flags: BenchFlags) -> Path | None:
    """Where the result goes, made sure of before the run; None when the name needs the model's."""
    folder = Path(flags.result_dir or ".")
    make_folder(folder, "--result-dir")
    if not flags.result_filename:
        return None
    check_writable(folder / flags.result_filename, "--result-filename")
    return folder / flags.result_filename


def default_name(flags: BenchFlags, plan: Plan) -> Path:
    ramp, limit = plan.arrivals.ramp, f"-concurrency{plan.concurrency}" if plan.concurrency else ""
    rate = f"ramp-up-{ramp.strategy}-{ramp.start}qps-{ramp.end}qps" if ramp else f"{plan.arrivals.rate}qps"
    model = plan.target.model.rsplit("/", 1)[-1]
    name = f"{flags.label or flags.backend}-{rate}{limit}-{model}-{_now()}.json"
    return Path(flags.result_dir or ".") / name


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def save(path: Path, flags: BenchFlags, report: Report, priority: str) -> None:
    """Raises UsageError when the file cannot be written."""
    result = {"date": _now(), "label": flags.label, "gapless_version": gapless.__version__, **report.json()}
    result |= {"backend": flags.backend, "endpoint_type": flags.backend}
    result["client"]["priority"] = priority
    result |= dict(key_values(flags.metadata, "--metadata"))
    if flags.save_detailed:
        result |= detailed_json(report.summary, report.run)
    text = json.dumps(result)
    write_text(path, text + "\n", "--save-result", append=flags.append_result)
    _say(f"wrote {path}")
