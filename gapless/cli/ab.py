"""`gapless ab`: two servers, or two flag sets of one, compared with statistics."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapless.cli.bench_flags import BenchFlags
from gapless.cli.bench_serve import make_plan
from gapless.cli.errors import UsageError
from gapless.cli.flags import Command
from gapless.cli.output import check_writable, make_folder, say, write_text
from gapless.lab.ab import run_experiment
from gapless.lab.ab_plan import AbFlags, Setup
from gapless.lab.arms import Arm, arms_from_flags, arms_from_urls, split_arms
from gapless.lab.compare import METRICS
from gapless.lab.report import REPORT_KIND, SCHEMA
from gapless.lab.report_pages import render_html, render_markdown
from gapless.lab.rules import apply_rules, check_rules, parse_rule
from gapless.lab.target import key_values

NOT_OURS = frozenset(
    {
        *("base_url", "port", "ready_check_timeout_sec", "num_warmups", "goodput", "probe_request_rate"),
        *("percentile_metrics", "metric_percentiles", "save_detailed", "disable_tqdm"),
    }
)
"""Fields of BenchFlags that mean nothing here."""
RULE_FAILED = 3
"""Exit code when a --fail-if holds: the comparison worked, and its answer is no."""
ENDINGS = ("md", "json", "html")
AB_EPILOG = """examples:
  gapless ab -- --depth 1 -- --depth auto                    two servers of the demo model, started and stopped here
  gapless ab --model DIR -- --dtype bfloat16 -- --depth 1 -- --depth auto
                                                             three groups: flags of both, of A, of B
  gapless ab --a-url http://localhost:8000 --b-url http://localhost:8001 --max-concurrency 32
  gapless ab --out depth --fail-if tokens:differ worse:1% -- --depth 1 -- --depth auto
  gapless ab --read depth.json                               show a report again

The runs alternate (AB BA AB BA ...), each pair with the same prompts and seed, and the statistics are over runs.
A run is what `gapless bench serve` does with the same flags. The report goes to standard output as Markdown.
Exit codes: 0 done, 1 something failed, 2 a wrong command line, 3 a --fail-if holds."""


def main(argv: Sequence[str]) -> int:
    command = Command(
        "ab",
        "Compare two servers, or two flag sets of one: interleaved runs, paired prompts, a verdict for each metric.",
        (AbFlags, BenchFlags),
        greedy=True,
        without=NOT_OURS,
    )
    command.usage, command.epilog = "gapless ab [flags] -- FLAGS OF A -- FLAGS OF B", AB_EPILOG
    command.add_api_key("of servers at URLs")
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    # As in bench: GAPLESS_MODEL and its like are meant for the servers, which inherit them.
    command.add_argument("URLS", nargs="*", help="two of them: the same as --a-url and --b-url")
    settings = command.read(words[:at], {})
    flags, load = settings.build(AbFlags), settings.build(BenchFlags)
    if urls := settings.options.URLS:
        if len(urls) != 2 or flags.a_url or flags.b_url:
            raise UsageError(f"give the URLs of both servers, A first, got {' '.join(urls)}")
        flags = replace(flags, a_url=urls[0], b_url=urls[1])
    rules = [parse_rule(text) for text in flags.fail_if]
    if load.out:
        make_folder(Path(load.out).parent, "--out")
        for ending in ENDINGS:
            check_writable(f"{load.out}.{ending}", "--out")
    if flags.read:
        report = _read(Path(flags.read))
        check_rules(rules, tuple(METRICS))
    else:
        setup = make_setup(flags, load, words[at:], settings.api_key, ("gapless", "ab", *words))
        check_rules(rules, flags.judged)
        signal.signal(signal.SIGTERM, _end)  # it must stop the servers that are started here
        report = run_experiment(setup, say)
    report["rules"] = apply_rules(rules, report) or report["rules"]
    _write(report, load.out)
    return RULE_FAILED if any(rule["failed"] for rule in report["rules"]) else 0


def make_setup(flags: AbFlags, load: BenchFlags, groups: Sequence[str], key: str, command: Sequence[str]) -> Setup:
    """Everything that can be checked before a server is asked. Raises ConfigError."""
    arms = _arms(flags, load, groups, key)
    # Servers that are started here get the model as a flag; requests then name what the server lists.
    plan = make_plan(load if flags.a_url else replace(load, model=None))
    metadata = tuple(key_values(load.metadata, "--metadata"))
    return Setup(arms, plan, flags, load.client_priority, metadata, tuple(command))


def _arms(flags: AbFlags, load: BenchFlags, groups: Sequence[str], key: str) -> tuple[Arm, Arm]:
    found = split_arms(groups)
    if flags.a_url or flags.b_url:
        if found or not (flags.a_url and flags.b_url):
            raise UsageError("give both --a-url and --b-url, or two groups of flags after --, not a mixture")
        return arms_from_urls(flags.a_url, flags.b_url, key, load.insecure)
    if not found:
        raise UsageError("say what A and B are: `-- FLAGS OF A -- FLAGS OF B`, or --a-url and --b-url")
    both = ["--model", load.model] if load.model else []
    return arms_from_flags([*both, *(found[0] if len(found) == 3 else [])], *found[-2:])


def _end(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(report, dict) or report.get("kind") != REPORT_KIND or report.get("schema") != SCHEMA:
        raise UsageError(f"--read {path}: not a report of gapless ab with schema {SCHEMA}")
    return report


def _write(report: Mapping[str, Any], prefix: str | None) -> None:
    markdown = render_markdown(report)
    print(markdown, end="")
    if prefix is None:
        return
    texts = markdown, json.dumps(report, indent=1) + "\n", render_html(report)
    for ending, text in zip(ENDINGS, texts, strict=True):
        write_text(f"{prefix}.{ending}", text, "--out")
