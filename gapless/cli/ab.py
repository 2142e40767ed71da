"""`gapless ab`: two servers, or two flag sets of one, compared with statistics."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.cli.errors import UsageError
from gapless.cli.flags import Command

if TYPE_CHECKING:
    from gapless.lab.ab import Plan
    from gapless.lab.arms import Arm
    from gapless.lab.paired_load import Load

RULE_FAILED = 3
"""Exit code when a --fail-if holds: the comparison worked, and its answer is no."""
KEY_VARIABLES = ("GAPLESS_API_KEY", "OPENAI_API_KEY")
EPILOG = """examples:
  gapless ab -- --depth 1 -- --depth auto                     two servers of the demo model, started and stopped here
  gapless ab --model DIR -- --dtype bfloat16 -- --depth 1 -- --depth auto
                                                              three groups: flags of both, of A, of B
  gapless ab --a-url http://localhost:8000 --b-url http://localhost:8001
  gapless ab --out depth --fail-if tokens:differ --fail-if worse:1% -- --depth 1 -- --depth auto
  gapless ab --read depth.json                                show a report again

The runs alternate (AB BA AB BA ...), each pair with the same prompts and seed, and the statistics are over runs.
The Markdown report goes to standard output, progress to standard error.
Exit codes: 0 done, 1 something failed, 2 a wrong command line, 3 a --fail-if holds."""


def main(argv: Sequence[str]) -> int:
    command = _command()
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    options = command.read(words[:at], os.environ).options
    from gapless.lab.rules import apply_rules, check_rules, parse_rule

    rules = [parse_rule(text) for text in options.fail_if]
    if options.read:
        report = _read(Path(options.read))
    else:
        plan = _plan(options, words[at:], words).check()
        check_rules(rules, plan.metrics)
        report = _run(plan)
    report["rules"] = apply_rules(rules, report) or report["rules"]
    _write(report, options.out)
    return RULE_FAILED if any(rule["failed"] for rule in report["rules"]) else 0


def _command() -> Command:
    command = Command(
        "ab",
        "Compare two servers, or two flag sets of one: interleaved runs, paired prompts, a verdict for each metric.",
        words="[flags] -- FLAGS OF A -- FLAGS OF B",
        epilog=EPILOG,
    )
    _experiment_flags(command)
    _load_flags(command)
    return command


def _experiment_flags(command: Command) -> None:
    group = command.add_argument_group("Experiment")
    add = group.add_argument
    add("--a-url", metavar="URL", help="arm A is this server, which runs already")
    add("--b-url", metavar="URL", help="arm B likewise; the same URL as A makes an A/A test")
    add("--runs", "-n", type=int, default=10, help="runs an arm, an even number (default: 10)")
    add("--metrics", metavar="KEYS", help="metrics to judge, with commas between; the first one may stop --stop-early")
    add("--test", choices=("crossover", "permutation", "welch"), default="crossover", help="(default: crossover)")
    add("--order", choices=("abba", "random"), default="abba", help="of the runs within pairs (default: abba)")
    add("--alpha", type=float, default=0.05, help="chance of a false call in the whole list (default: 0.05)")
    add("--stop-early", action="store_true", help="stop at a quarter, a half or three when the first metric is decided")
    add("--restart", action="store_true", help="new servers for every pair: starts differ, too")
    add("--warmup-runs", type=int, default=1, help="whole runs on each arm that do not count (default: 1)")
    add("--quiet", type=float, default=0.1, metavar="SHARE", help="begin a run when others keep at most this share of "
        "the processors busy (default: 0.1)")  # fmt: skip
    add("--quiet-wait", type=float, default=60.0, metavar="SECONDS", help="... or after so long (default: 60)")
    add("--pause", type=float, default=0.5, metavar="SECONDS", help="between two runs (default: 0.5)")
    add("--out", metavar="PREFIX", help="also write PREFIX.md, PREFIX.json and PREFIX.html")
    add(
        "--read", metavar="FILE", help="show, write and judge the JSON of an earlier report instead of running anything"
    )
    add("--fail-if", action="append", default=[], metavar="RULE", help="exit with 3 when this holds: worse:1%%, "
        "tpot:worse:2%%, maybe-worse:2%%, tokens:differ, requests:failed, differ; may be repeated")  # fmt: skip


def _load_flags(command: Command) -> None:
    group = command.add_argument_group("Load of a run")
    add = group.add_argument
    add("--model", metavar="MODEL", help="model that both servers are started with, or that is asked for at the URLs")
    add("--backend", choices=("openai", "openai-chat"), default="openai", help="completions or chat (default: openai)")
    add("--dataset-name", default="random", metavar="NAME", help="as in gapless bench serve (default: random)")
    add("--dataset-path", default="", metavar="FILE", help="for data sets that are files")
    add("--num-prompts", type=int, default=64, help="requests a run (default: 64)")
    add("--random-input-len", "--input-len", type=int, default=128, help="tokens (default: 128)")
    add("--random-output-len", "--output-len", type=int, default=128, help="tokens (default: 128)")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share (default: 0)")
    add("--max-concurrency", type=int, default=8, help="requests under way; 0 for no limit (default: 8)")
    add("--request-rate", type=float, default=math.inf, help="requests a second (default: inf, a closed loop)")
    add("--burstiness", type=float, default=1.0, help="1 is Poisson, less is bursty, inf is constant (default: 1)")
    add("--seed", type=int, default=0, help="of the first pair's prompts; each pair has the next one (default: 0)")
    add("--ignore-eos", action=_boolean(), default=True, help="answers have their full length (default: on)")
    add("--temperature", type=float, default=0.0, help="above 0 the arms need not say the same (default: 0)")
    add("--extra-body", default="{}", metavar="JSON", help="laid into every request")
    add("--tokenizer", metavar="DIR", help="where prompts take token ids from (default: the server says)")
    add("--vocab-size", type=int, help="token ids of prompts are below this")
    add("--api-key", metavar="KEY", help=f"key for servers at URLs; also ${' and $'.join(KEY_VARIABLES)}")


def _boolean() -> Any:
    from argparse import BooleanOptionalAction

    return BooleanOptionalAction


def _plan(options: Namespace, behind: Sequence[str], command: Sequence[str]) -> Plan:
    """Raises ConfigError."""
    from gapless.lab.ab import Plan
    from gapless.lab.compare import JUDGED, Rules

    if not 0 < options.alpha < 1:
        raise UsageError(f"--alpha must lie between 0 and 1, got {options.alpha}")
    return Plan(
        arms=_arms(options, behind),
        load=_load(options),
        pairs=options.runs,
        metrics=tuple(options.metrics.split(",")) if options.metrics else JUDGED,
        rules=Rules(options.test, options.alpha),
        order=options.order,
        order_seed=options.seed,
        stop_early=options.stop_early,
        restart=options.restart,
        warm_up_runs=options.warmup_runs,
        quiet=options.quiet,
        quiet_seconds=options.quiet_wait,
        pause=options.pause,
        command=("gapless", "ab", *command),
    )


def _arms(options: Namespace, behind: Sequence[str]) -> tuple[Arm, Arm]:
    from gapless.lab.arms import arms_from_flags, arms_from_urls, split_arms

    _, groups = split_arms(behind)
    if options.a_url or options.b_url:
        if groups or not (options.a_url and options.b_url):
            raise UsageError("give both --a-url and --b-url, or two groups of flags behind --, not a mixture")
        key = options.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
        return arms_from_urls(options.a_url, options.b_url, key)
    if not groups:
        raise UsageError("say what A and B are: `-- FLAGS OF A -- FLAGS OF B`, or --a-url and --b-url")
    both = ["--model", options.model] if options.model else []
    return arms_from_flags([*both, *(groups[0] if len(groups) == 3 else [])], *groups[-2:])


def _load(options: Namespace) -> Load:
    from gapless.lab.arrivals import Arrivals
    from gapless.lab.paired_load import Load
    from gapless.lab.workload import Workload

    try:
        extra = json.loads(options.extra_body)
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise UsageError(f"--extra-body must be a JSON object, got {options.extra_body!r}")
    if options.temperature:
        extra = {"temperature": options.temperature, **extra}
    if options.max_concurrency < 0:
        raise UsageError(f"--max-concurrency must be 0 (no limit) or more, got {options.max_concurrency}")
    work = Workload(
        dataset=options.dataset_name.replace("-", "_"),
        num_prompts=options.num_prompts,
        seed=options.seed,
        path=options.dataset_path,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
    )
    return Load(
        work,
        Arrivals(options.request_rate, options.burstiness).check(),
        options.max_concurrency or None,
        backend=options.backend,
        model=options.model if options.a_url and options.model else "",
        ignore_eos=options.ignore_eos,
        extra_body=extra,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
    )


def _run(plan: Plan) -> dict[str, Any]:
    from gapless.lab.ab import run_experiment

    # The servers that were started must be stopped when this process is told to end.
    signal.signal(signal.SIGTERM, _end)
    return run_experiment(plan, lambda text: print(text, file=sys.stderr, flush=True))


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _read(path: Path) -> dict[str, Any]:
    from gapless.base.files import read_json
    from gapless.lab.report import KIND, SCHEMA

    report = read_json(path)
    if report is None:
        raise UsageError(f"--read {path}: no such file")
    if report.get("kind") != KIND or report.get("schema") != SCHEMA:
        raise UsageError(f"--read {path}: not a report of gapless ab with schema {SCHEMA}")
    return report


def _write(report: Mapping[str, Any], prefix: str | None) -> None:
    from gapless.lab.report_html import render_html
    from gapless.lab.report_markdown import render_markdown

    markdown = render_markdown(report)
    print(markdown, end="")
    if prefix is None:
        return
    texts = {"md": markdown, "json": json.dumps(report, indent=1) + "\n", "html": render_html(report)}
    for ending, text in texts.items():
        path = Path(f"{prefix}.{ending}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {prefix}: {path} cannot be written: {error.strerror or error}") from error
