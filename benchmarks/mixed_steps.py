"""Time of a step by its prompt tokens and decoding rows: `PYTHONPATH=.:benchmarks python benchmarks/mixed_steps.py`.

Qwen3-0.6B's shape with random weights, in process. A step with prompt tokens holds back the tokens of decoding rows, so
these times say how long a chunk stalls them, and what a token costs in chunks of each size.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from ab_depth import make_qwen
from prompts import submit

from gapless.base.config import EngineConfig
from gapless.engine.core import EngineCore, build_core

PROMPT = 128


def build(folder: Path, device: str, tokens: int) -> EngineCore:
    return build_core(
        EngineConfig(
            model=str(folder), load_format="dummy", device=device, max_num_seqs=64, max_model_len=4096,
            enable_prefix_caching=False, max_num_batched_tokens=tokens, kv_cache_memory_bytes=4 << 30,
        )
    )  # fmt: skip


def step_ms(core: EngineCore, rows: int, tokens: int, rounds: int) -> float:
    """Return the median time on the device of a step of `rows` decoding rows and `tokens` prompt tokens, ms."""
    for row in range(rows):
        submit(core, row, PROMPT, 3000)
    for _ in range(12 if rows else 0):
        core.step()
    found: list[float] = []
    for number in range(rounds):
        for prompt in range(tokens // PROMPT):
            submit(core, 1000 * (number + 1) + prompt, PROMPT, 1)
        for _ in range(4):
            if core.has_work():
                core.step()
        steps = [step for step in core.steps_after(0) if (step.chunk_tokens, step.decode_rows) == (tokens, rows)]
        found = [step.device_ns / 1e6 for step in steps]
    for row in range(rows):
        core.abort(row)
    while core.has_work():
        core.step()
    return statistics.median(found) if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_qwen(Path(folder))
        print(f"{torch.get_num_threads()} threads; ms a step, prompts of 128 tokens\n")
        print_table(checkpoint, options.device, options.tokens, options.rows, options.rounds)


def print_table(folder: Path, device: str, sizes: Sequence[int], rows: Sequence[int], rounds: int) -> None:
    print("| prompt tokens | " + " | ".join(f"{count} rows decode" for count in rows) + " |")
    print("|---:|" + "---:|" * len(rows))
    for tokens in sizes:
        core = build(folder, device, tokens + max(rows))
        times = [step_ms(core, count, tokens, rounds) for count in rows]
        core.close()
        print(f"| {tokens} | " + " | ".join(f"{ms:.1f}" for ms in times) + " |", flush=True)


if __name__ == "__main__":
    main()
