"""Tokens/s and energy of rows that decode at once, offline.

`PYTHONPATH=.:benchmarks python benchmarks/rows.py --size 8B --device cuda --rows 1 32 256` prints a table: the shape of
a Qwen3 with random weights, medians of the rounds, greedy. Power is the GPU's own reading, every 20 ms of a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from shapes import SHAPES, make_qwen

from gapless import LLM, SamplingParams


class Power(threading.Thread):
    """Reads the GPU's power in watts until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.watts: list[float] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while torch.cuda.is_available() and not self.ended.wait(0.02):
            self.watts.append(torch.cuda.power_draw() / 1e3)

    def stop(self) -> float:
        self.ended.set()
        self.join()
        return statistics.fmean(self.watts or [float("nan")])


def measured(llm: LLM, rows: int, prompt: int, output: int) -> tuple[float, float]:
    """Return tokens/s and watts of one round."""
    prompts = [[(7 * row + 13 * place) % 200 + 5 for place in range(prompt)] for row in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    power, begin = Power(), time.perf_counter()
    power.start()
    llm.generate(prompts, params, use_tqdm=False)
    return rows * output / (time.perf_counter() - begin), power.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="8B")
    parser.add_argument("--model", help="a model with weights, instead of a size")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", help="of weights at load")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(make_qwen(Path(folder) / given.size, size=given.size))
        dummy = {} if given.model else {"load_format": "dummy", "dtype": "bfloat16"}
        dummy |= {"quantization": given.quantization} if given.quantization else {}
        length = given.prompt + given.output
        with LLM(model, device=given.device, max_model_len=length, max_num_seqs=max(given.rows), **dummy) as llm:
            print("| rows | tokens/s | ms a step | W | mJ a token |\n|" + "---:|" * 5)
            for rows in given.rows:
                measured(llm, rows, given.prompt, given.output)
                rounds = [measured(llm, rows, given.prompt, given.output) for _ in range(given.rounds)]
                rate, watts = map(statistics.median, zip(*rounds, strict=True))
                print(f"| {rows} | {rate:,.0f} | {1e3 * rows / rate:.3f} | {watts:.0f} | {1e3 * watts / rate:.1f} |")


if __name__ == "__main__":
    main()
