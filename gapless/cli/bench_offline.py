"""`gapless bench throughput`, `latency` and `startup`: an engine of this machine, without a server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import gapless
from gapless.base.config import EngineConfig
from gapless.base.progress import starting
from gapless.cli.bench_flags import DATA_SETS
from gapless.cli.flags import Command, Settings, number
from gapless.cli.output import check_writable, write_text
from gapless.engine.progress import progress
from gapless.lab import offline, startup
from gapless.lab.datasets import Source, Workload, build

MOST = (1 << 31) - 1
OFFLINE_DATASETS = ("random", "prefix_repetition", "shared_prefix", "custom", "sharegpt")


def _command(name: str, description: str, input_len: int = 0) -> Command:
    """The parser of a command; one that generates has a default of `input_len` tokens a prompt."""
    command = Command(f"bench {name}", description, (EngineConfig,), model_word=True, greedy=True)
    command.add_argument("-o", "--output-json", metavar="FILE", help="write the result there")
    command.add_argument("--disable-tqdm", action="store_true", help="no progress")
    if input_len:
        _count(command, "--input-len", input_len, "tokens of a prompt")
        _count(command, "--output-len", 128, "tokens of an answer")
        command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    return command


def _read(command: Command, argv: Sequence[str]) -> Settings:
    settings = command.read(argv)
    settings.show_notes()
    settings.build(EngineConfig)  # reports a wrong flag before torch is loaded
    if settings.options.output_json:
        check_writable(settings.options.output_json, "--output-json")
    return settings


def _engine(settings: Settings) -> gapless.LLM:
    with starting(not settings.options.disable_tqdm):
        return gapless.LLM(**settings.given(EngineConfig))


def _count(command: Command, flag: str, default: int, help: str, low: int = 1) -> None:
    help = f"{help} (default: {default})"
    command.add_argument(flag, type=number(low, MOST, int), default=default, metavar="N", help=help)


def _finish(settings: Settings, lines: Sequence[str], result: dict[str, Any]) -> int:
    print("\n".join(lines))
    path = settings.options.output_json
    if path:
        about = {"model": settings.build(EngineConfig).model, "gapless_version": gapless.__version__}
        text = json.dumps({**about, **result}, indent=1)
        write_text(path, text + "\n", "--output-json")
    return 0


def main_throughput(argv: Sequence[str]) -> int:
    command = _command("throughput", "All prompts at once to an engine in this process.", input_len=512)
    _count(command, "--num-prompts", 128, "how many")
    share = "lengths vary by it, up and down (default: 0)"
    command.add_argument("--random-range-ratio", type=float, default=0.0, metavar="SHARE", help=share)
    command.add_argument(
        "--dataset-name", default="random", choices=OFFLINE_DATASETS, help="what the prompts are (default: random)",
        type=lambda name: name.replace("-", "_"),
    )  # fmt: skip
    command.add_argument("--dataset-path", default="", metavar="FILE", help="of custom and sharegpt")
    settings = _read(command, argv)
    options = settings.options
    name, defaults = DATA_SETS[options.dataset_name]
    prefix_len = options.input_len // 2 if name == "shared_prefix" else 0
    work = Workload(
        dataset=name,
        num_prompts=options.num_prompts,
        seed=settings.given(EngineConfig).get("seed", 0),
        path=options.dataset_path,
        input_len=options.input_len - prefix_len,
        output_len=0 if name == "sharegpt" else options.output_len,  # 0: as long as in the file
        range_ratio=options.random_range_ratio,
        prefix_len=prefix_len,
        zipf=defaults.get("zipf", 0.0),
    )
    with _engine(settings) as llm:
        prompts = build(work, Source(range(llm.info.vocab_size)))
        result = offline.throughput(llm, prompts, temperature=options.temperature, bar=not options.disable_tqdm)
    return _finish(settings, *result)


def main_latency(argv: Sequence[str]) -> int:
    command = _command("latency", "The time of one batch in this process.", input_len=32)
    _count(command, "--batch-size", 8, "prompts at once")
    _count(command, "--num-iters-warmup", 10, "batches before, not counted", low=0)
    _count(command, "--num-iters", 30, "batches that count")
    settings = _read(command, argv)
    options = settings.options
    seed = settings.given(EngineConfig).get("seed", 0)
    batch = offline.OfflineBatch(options.batch_size, options.input_len, options.output_len, options.temperature, seed)
    total = options.num_iters_warmup + options.num_iters
    with _engine(settings) as llm, progress("batches", total, wanted=not options.disable_tqdm) as advance:
        result = offline.latency(
            llm, batch, warmups=options.num_iters_warmup, iterations=options.num_iters, advance=advance
        )
    return _finish(settings, *result)


def main_startup(argv: Sequence[str]) -> int:
    command = _command("startup", "Where the time of a start goes, each in a fresh process.")
    _count(command, "--num-iters", 3, "starts; the first is shown by itself")
    settings = _read(command, argv)
    count = settings.options.num_iters
    from gapless.engine.frontdoor import locate  # brings the tokenizers library

    # A fetch is no part of a start, and a child's progress would not be seen.
    options = dataclasses.asdict(locate(settings.build(EngineConfig)).config)
    with progress("starts", count, wanted=not settings.options.disable_tqdm) as advance:
        starts = startup.measure_starts(options, count, advance)
    return _finish(settings, startup.table(starts), startup.startup_json(starts))
