"""The statistics of `gapless ab` on a real server: how often an A/A is called a difference, and a planted 3 % found.

`python benchmarks/ab_aa.py --out FILE` makes many short experiments with one server as both arms, and keeps the figures
of all runs; `--read FILE` judges them again. The planted difference is added to B's figures, so that the noise stays
the real one; on a noisy machine `--effect 0.5` plants 50 % instead of 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gapless.lab import environment
from gapless.lab.arms import Arm, live
from gapless.lab.bench import LoadPlan
from gapless.lab.compare import JUDGED
from gapless.lab.datasets import Workload
from gapless.lab.distributions import t_power
from gapless.lab.paired_load import PairedLoad
from gapless.lab.significance import crossover, holm, pairs_needed, sign_flip_p, spread_of
from gapless.lab.summary import figures

ALPHA, POWER = 0.05, 0.8


def measure(experiments: int, pairs: int, work: Workload, concurrency: int, flags: Sequence[str]) -> dict[str, Any]:
    """All runs of one server as both arms, in the order A B, B A, ..."""
    arm = Arm("A", "one server", flags=tuple(flags))
    runs: dict[str, list[list[float]]] = {key: [] for key in JUDGED}
    with live(arm) as server:
        load = PairedLoad(LoadPlan(work=work, concurrency=concurrency))
        asyncio.run(load.meet((server, server)))
        load.play(0, 1_000_000)
        for pair in range(experiments * pairs):
            played = [figures(load.play(which, pair).summary) for which in (0, 1)]
            for key in JUDGED:
                runs[key].append([float(f"{metrics.get(key, 0.0):.5g}") for metrics in played])
        described, facts = load.described(), dict(server.facts)
    host = environment.describe_host()
    return {"experiments": experiments, "pairs": pairs, "work": described, "server": facts, "host": host, "runs": runs}


def chunks(values: Sequence[Sequence[float]], pairs: int) -> Iterator[tuple[list[float], list[float], list[bool]]]:
    """(A, B, whether A came first) of one experiment after the other; the runs of a pair alternate between the arms."""
    order = [k % 2 == 0 for k in range(pairs)]
    for start in range(0, len(values) - pairs + 1, pairs):
        part = values[start : start + pairs]
        a = [pair[0 if first else 1] for pair, first in zip(part, order, strict=True)]
        b = [pair[1 if first else 0] for pair, first in zip(part, order, strict=True)]
        yield a, b, order


def report(data: dict[str, Any], effect: float) -> None:
    pairs = data["pairs"]
    print(
        f"A/A, {data['experiments']} experiments of {pairs} runs an arm; called at p < {ALPHA}; planted: {effect:.0%}"
    )
    print("| metric | cross-over t | sign flips | spread of a pair | runs predicted for 80 % | power there | found |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    families: list[list[float]] = [[] for _ in range(data["experiments"])]
    for key in JUDGED:
        values = data["runs"][key]
        if not all(map(all, values)):
            print(f"| {key} | not judged: some runs have no such figure |")
            continue
        found = list(chunks(values, pairs))
        p_values = [crossover(*one).p for one in found]
        for family, p in zip(families, p_values, strict=True):
            family.append(p)
        flips = [sign_flip_p([y - x for x, y in zip(a, b, strict=True)]) for a, b, _ in found]
        called = sum(p < ALPHA for p in p_values)
        print(f"| {key} | {called} | {sum(p < ALPHA for p in flips)} | {planted(values, effect)} |")
    whole = sum(min(holm(family)) < ALPHA for family in families)
    print(f"any of the {len(JUDGED)} metrics, with Holm: {whole} of {data['experiments']}")


def planted(values: Sequence[Sequence[float]], effect: float) -> str:
    """Spread of a pair, runs predicted, their power, and how many such experiments found the difference."""
    ((a, b, order),) = chunks(values, len(values))
    mean = math.fsum(a) / len(a)
    spread = spread_of(crossover(a, b, order), len(values)) / mean
    pairs = pairs_needed(effect, spread, ALPHA, POWER)
    pairs += pairs % 2
    power = t_power(effect * math.sqrt(pairs) / spread, pairs - 2, ALPHA)
    tried = [crossover(x, [v + effect * mean for v in y], first).p < ALPHA for x, y, first in chunks(values, pairs)]
    share = f"{sum(tried)} of {len(tried)} ({sum(tried) / len(tried):.0%})" if tried else "too few runs"
    return f"{spread:.1%} | {pairs} | {power:.0%} | {share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=200)
    parser.add_argument("--runs", type=int, default=6, help="an arm, in each experiment; even")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--effect", type=float, default=0.03, help="planted, as a share")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("flags", nargs="*", help="of gapless serve, behind --")
    args = parser.parse_args()
    if args.read:
        report(json.loads(args.read.read_text()), args.effect)
        return
    work = Workload(num_prompts=args.num_prompts, input_len=args.input_len, output_len=args.output_len)
    data = measure(args.experiments, args.runs, work, args.max_concurrency, args.flags)
    if args.out:
        args.out.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    report(data, args.effect)


if __name__ == "__main__":
    main()
