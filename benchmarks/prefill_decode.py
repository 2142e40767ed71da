"""Prefill and decode apart beside two servers that do both: what users wait for under one load.

`PYTHONPATH=.:benchmarks python benchmarks/prefill_decode.py --model DIR [--rate 8] [--rounds 3] [-- --device cuda]`
starts `serve --pd 1p1d` and two plain servers, whose requests alternate. All get the same prompts at the same times
(Poisson), in turn; no prompt begins as another does. With two GPUs each engine of a side has
one; with fewer the engines share it. Flags after `--` go to every server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from peer_servers import Server, Spec
from peer_work import LogUniform

from gapless.lab.arrivals import Arrivals
from gapless.lab.datasets import Lengths, Prompt, Source, random_prompts
from gapless.lab.http import with_client
from gapless.lab.load import run_load
from gapless.lab.records import Sample
from gapless.lab.stats import percentile
from gapless.lab.target import Target

SERVE = "env {devices} {python} -m gapless serve {model} --port {port} --served-model-name m {flags}"
COLUMNS = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "ITL p99.9", "longest")
Times = Sequence[float]
Sides = dict[str, list[tuple[str, str, str]]]
"""The servers of each side: name, environment and flags"""


def devices(gpus: Sequence[str], *engines: int) -> str:
    """The environment of a server whose engines have the GPUs at these places."""
    enough = len(gpus) > max(engines)
    return f"CUDA_VISIBLE_DEVICES={','.join(gpus[number] for number in engines)}" if enough else ""


@contextmanager
def serving(servers: Sequence[Server]) -> Iterator[None]:
    """Start these servers together, and stop them at the end."""
    pool = ThreadPoolExecutor()
    try:
        list(pool.map(Server.start, servers))
        yield
    finally:
        for server in servers:  # where one could not start, this ends the start of the others
            server.stop()
        pool.shutdown()


async def load(urls: Sequence[str], prompts: Sequence[Prompt], times: Times) -> list[Sample]:
    """Send the prompts at their times, to each server in turn; samples of all."""
    count = len(urls)
    runs = [
        with_client(Target(url, "m"), partial(run_load, prompts=prompts[i::count], times=times[i::count]))
        for i, url in enumerate(urls)
    ]
    samples = [sample for run in await asyncio.gather(*runs) for sample in run.samples]
    assert not (errors := [sample.error for sample in samples if sample.error]), errors[0]
    return samples


def figures(samples: Sequence[Sample]) -> list[float]:
    """The columns, in ms."""
    ttfts = sorted(1e3 * sample.ttft for sample in samples)
    itls = sorted(1e3 * itl for sample in samples for itl in sample.itls)
    asked = ((ttfts, 50), (ttfts, 99), (itls, 50), (itls, 99), (itls, 99.9), (itls, 100))
    return [percentile(values, percent) for values, percent in asked]


def show(name: str, row: Sequence[object], width: str = ">12.2f") -> None:
    print(f"{name:<26}" + "".join(f"{value:{width}}" for value in row), flush=True)


def play(urls: dict[str, list[str]], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """The figures of each round, by side; the sides take turns."""
    lengths, answers = LogUniform(options.shortest, options.longest), Lengths(options.output)
    found: dict[str, list[list[float]]] = {side: [] for side in urls}
    show("ms; last: medians", COLUMNS, ">12")
    for count in range(1 + options.rounds):
        source = Source(range(3, options.vocabulary))
        prompts = random_prompts(source, options.requests, lengths, answers, seed=count)
        times = Arrivals(options.rate).times(options.requests, count)
        for side in sorted(urls, reverse=count % 2 > 0):
            samples = asyncio.run(load(urls[side], prompts, times))
            if count:
                found[side].append(figures(samples))
                show(f"{side}, round {count}", found[side][-1])
    return found


def medians(found: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """The columns of each side, medians of its rounds."""
    return {side: [median(values) for values in zip(*rounds, strict=True)] for side, rounds in found.items()}


@contextmanager
def started(
    sides: dict[str, list[tuple[str, str, str]]], options: argparse.Namespace
) -> Iterator[dict[str, list[str]]]:
    """The URLs of the servers of each side, given by name, environment and flags, while they run."""
    words = {"python": sys.executable, "model": options.model}
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        made = {
            side: [
                Server(Spec(name, SERVE), {**words, "devices": env, "flags": flags}, logs / f"{name}.log")
                for name, env, flags in servers
            ]
            for side, servers in sides.items()
        }
        try:
            with serving([server for servers in made.values() for server in servers]):
                yield {side: [server.url for server in servers] for side, servers in made.items()}
        except RuntimeError:
            print(*(f"{log.name}:\n{log.read_text()[-1500:]}" for log in logs.glob("*.log")), sep="\n", flush=True)
            raise


def pair_and_mixed(options: argparse.Namespace) -> Sides:
    flags, pair = " ".join(options.flags), devices(options.gpus, *range(2 * options.ranks))
    own = [devices(options.gpus, *range(at, at + options.ranks)) for at in (0, options.ranks)]
    return {
        "apart": [("pair", pair, f"--pd 1p1d {options.pair} {flags}")],
        "mixed": [(f"mixed-{number}", environment, flags) for number, environment in enumerate(own)],
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocabulary", type=int, default=2000, help="prompts have ids below it")
    parser.add_argument("--shortest", type=int, default=256)
    parser.add_argument("--longest", type=int, default=4000)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="of each side, after one that is left out")
    parser.add_argument("--pair", default="", help="flags of the pair alone, in one word: '--kv-tier host:4GiB ...'")
    parser.add_argument("--ranks", type=int, default=1, help="of each engine, as --tensor-parallel-size after --")
    seen = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    parser.add_argument("--gpus", nargs="*", default=seen, help="GPUs of the engines; default: CUDA_VISIBLE_DEVICES")
    parser.add_argument("--logs", type=Path, help="a folder for what the servers say; default: a temporary one")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    return parser


def main() -> None:
    options = parser().parse_args()
    with started(pair_and_mixed(options), options) as urls:
        middle = medians(play(urls, options))
    for side, row in middle.items():
        show(side, row)
    show("apart / mixed", [a / b if b else 0.0 for a, b in zip(middle["apart"], middle["mixed"], strict=True)])


if __name__ == "__main__":
    main()
