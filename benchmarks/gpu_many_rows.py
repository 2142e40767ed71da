"""Decode batches of 33 to 256 rows on a GPU: fused layers beside separate steps, in Qwen3-0.6B's shape.
`PYTHONPATH=.:benchmarks python benchmarks/gpu_many_rows.py` prints a table; takes about a minute.

Two engines run the same load in turn; one has no way of its own for such batches. The first round is left out. Times of
a step are medians of the rounds' medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_all import Load, Result, drive, engine

from gapless.engine.core import EngineCore
from gapless.kernels import all_triton

ROUNDS = 3
PROMPT, OUTPUT = 64, 192


def arms() -> Iterator[tuple[str, EngineCore]]:
    """The engines by name. One captures its graphs with the kernels that it is built with."""
    fused = all_triton.HALF_KERNELS
    with tempfile.TemporaryDirectory() as folder:
        for name, kernels in (("separate", fused._replace(many_rows=None)), ("fused", fused)):
            all_triton.HALF_KERNELS = kernels
            yield name, engine(Path(folder), enable_prefix_caching=False)


def line(count: int, cores: dict[str, EngineCore]) -> str:
    """One line of the table: `count` rows."""
    found: dict[str, list[Result]] = {name: [] for name in cores}
    for turn in range(ROUNDS + 1):
        for name, core in cores.items():
            core.loop.log.forget()
            found[name].append(drive(core, Load(count, PROMPT, OUTPUT), seed=turn))
    kept = [results[1:] for results in found.values()]
    steps = [f"{statistics.median(r.step_us for r in results):.0f}" for results in kept]
    ratios = ", ".join(f"{b.step_us / a.step_us:.3f}" for a, b in zip(*kept, strict=True))
    speeds = [f"{statistics.median(r.tokens_per_s for r in results):.0f}" for results in kept]
    return f"| {count} | " + " | ".join([*steps, ratios, *speeds]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 256])
    args = parser.parse_args()
    cores = dict(arms())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {PROMPT} tokens in, {OUTPUT} out\n")
    print("| rows | step, us: separate | fused | fused / separate | tokens/s: separate | fused |")
    print("|---:|---:|---:|---|---:|---:|", flush=True)
    for count in args.rows:
        print(line(count, cores), flush=True)
    for core in cores.values():
        core.close()


if __name__ == "__main__":
    main()
