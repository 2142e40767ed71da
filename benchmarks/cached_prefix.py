"""TTFT of prompts whose beginning is cached, one at a time, by the lengths of the beginning and of the rest.

`PYTHONPATH=.:benchmarks python benchmarks/cached_prefix.py [--device cuda] [--after 0 4000 32000] [--tokens 20 100]`
prints a table of medians. The shape is Qwen3-0.6B's with random weights, or that of the `config.json` in `--model`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from ab_depth import QWEN3_06B

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.core import EngineCore, build_core

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
KEYS = itertools.count()


def ttft_ms(core: EngineCore, tokens: np.ndarray) -> float:
    """Measure the time until a prompt's first token comes; what is left to do after it is done."""
    begin, key = time.perf_counter(), next(KEYS)
    core.submit(Request(key, tokens, ONE_TOKEN, key, (), 0, len(tokens) + 1))
    while not any(key in step.keys for step in core.step()[1]):
        pass
    took = (time.perf_counter() - begin) * 1e3
    while core.has_work() or core.rest():
        core.step()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--after", type=int, nargs="+", default=[0, 1000, 4000], help="tokens that are cached")
    parser.add_argument("--tokens", type=int, nargs="+", default=[20, 100], help="tokens after them")
    parser.add_argument("--prompts", type=int, default=20, help="of each kind; three more come first")
    parser.add_argument("--model", help="a directory with another config.json; no weights are read")
    options = parser.parse_args()
    print("| after | " + " | ".join(f"{count} tokens, ms" for count in options.tokens) + " |")
    print("|---:|" + "---:|" * len(options.tokens))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_06B | {"max_position_embeddings": 40960}))
        core = build_core(
            EngineConfig(
                model=options.model or folder, load_format="dummy", device=options.device, max_num_seqs=8,
                max_model_len=max(options.after) + max(options.tokens) + 16,
            )
        )  # fmt: skip
    draw = np.random.default_rng(0)
    for after in options.after:
        prefix = draw.integers(200, core.info.vocab_size, after, np.int32)
        cells = []
        for count in options.tokens:
            rests = draw.integers(200, core.info.vocab_size, (3 + options.prompts, count), np.int32)
            cells.append(statistics.median([ttft_ms(core, np.concatenate((prefix, rest))) for rest in rests][3:]))
        print(f"| {after} | " + " | ".join(f"{ms:.1f}" for ms in cells) + " |", flush=True)
    core.close()


if __name__ == "__main__":
    main()
