"""Many seeds: `make sim SEEDS=20000`, or `make sim ARGS="--seed 17"` for one."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from simulation.pair import PairWorld
from simulation.scenario import PAIRS, RANKS, Scenario, draw
from simulation.shrink import shrink
from simulation.world import World

from gapless.kernels import native, plain
from gapless.kernels.seam import Kernels
from gapless.loop.loop import Loop

Prepare = Callable[[Loop], None]


def world_of(
    scenario: Scenario, prepare: Prepare = lambda loop: None, kernels: Kernels = plain.KERNELS
) -> World | PairWorld:
    """What runs this scenario: one engine, or a pair."""
    return (World if scenario.pair is None else PairWorld)(scenario, prepare, kernels)


def sound_world(scenario: Scenario, prepare: Prepare = lambda loop: None) -> World | PairWorld:
    """A world with nothing taken away. Most have the C++ operations, if there are any: these take half of the time."""
    kernels = native.load() if scenario.seed % 8 else None
    return world_of(scenario, prepare, kernels or plain.KERNELS)


def failure(scenario: Scenario) -> str | None:
    """What is wrong with this scenario, or None."""
    try:
        sound_world(scenario).run()
    except Exception as error:  # whatever it is, it is a finding
        return f"{type(error).__name__}: {error}"
    return None


def check(seed: int) -> str | None:
    """A report of the seed's failure, shrunk, or None."""
    scenario = draw(seed)
    found = failure(scenario)
    if found is None:
        return None
    small = shrink(scenario, lambda candidate: failure(candidate) is not None)
    return (
        f'seed {seed} fails: {found}\nagain: make sim ARGS="--seed {seed}"\n'
        f"the smallest scenario that still fails ({failure(small)}):\n{small}"
    )


def run(first: int, count: int, stride: int = 1) -> list[str]:
    """Reports of all failures among the seeds."""
    torch.set_num_threads(1)
    return [report for seed in range(first, first + count * stride, stride) if (report := check(seed))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--pairs", action="store_true", help="of a prefiller and a decoder")
    parser.add_argument("--ranks", action="store_true", help="of engines of several ranks")
    args = parser.parse_args()
    logging.getLogger("gapless").setLevel(logging.ERROR)  # captures fail because the seed says so
    if args.seed is not None:
        args.first, args.seeds, args.jobs = args.seed, 1, 1
    args.first += PAIRS if args.pairs else RANKS if args.ranks else 0
    begin = time.monotonic()
    if args.jobs > 1:
        code = _spread(args.first, args.seeds, args.jobs)
        print(f"{args.seeds} seeds from {args.first} in {time.monotonic() - begin:.0f} s, {args.jobs} processes")
        return code
    reports = run(args.first, args.seeds, args.stride)
    print("\n\n".join(reports) if reports else f"{args.seeds} seeds from {args.first}: no failure")
    return 1 if reports else 0


def _spread(first: int, seeds: int, jobs: int) -> int:
    command = [sys.executable, "-m", "simulation.run", "--jobs", "1", "--stride", str(jobs)]
    shares = [(first + job, len(range(job, seeds, jobs))) for job in range(jobs)]
    parts = [subprocess.Popen([*command, "--first", str(start), "--seeds", str(count)]) for start, count in shares]
    return max(part.wait() for part in parts)


if __name__ == "__main__":
    sys.exit(main())
