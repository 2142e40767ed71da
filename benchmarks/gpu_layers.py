"""Time of decode batches on a GPU in the shape of a Qwen3: its layers as one graph, and with the head after them.

    PYTHONPATH=.:benchmarks python benchmarks/gpu_layers.py [--size 8B] [--batches 32x1300 ragged32]

The floor is the time of reading weights, keys and values once, at the rate of a large copy. Takes half a minute, most
of it to compile.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from ab_depth import SHAPES
from gpu_all import bandwidth
from gpu_timing import seconds

from gapless.kernels.ahead_triton import ahead
from gapless.kernels.all_triton import HALF_KERNELS
from gapless.model.config import read_model_config
from gapless.model.dense import DenseModel
from gapless.model.params import allocate, fill_dummy
from gapless.model.seam import BatchShape, StepInputs

CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
PAGE, LONGEST = 16, 4096
_drawn = random.Random(1)
BATCHES = {f"{rows}x{length}": [length] * rows for rows in (8, 16, 24, 32) for length in (512, 1300, 4000)}
BATCHES |= {f"{rows}x512": [512] * rows for rows in (1, 2, 3, 4, 64, 128, 256)}
BATCHES |= {f"ragged{rows}": [_drawn.randint(100, 2500) for _ in range(rows)] for rows in (32, 16)}


def dummy_model(size: str) -> DenseModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[size]))
        config = read_model_config(Path(folder))
    params = allocate(config, DTYPE, CUDA)
    fill_dummy(params, 0)
    return DenseModel(config, params, LONGEST, HALF_KERNELS)


class Step:
    """Forwards of one model over a cache of random numbers."""

    def __init__(self, pages: int, size: str = "0.6B") -> None:
        self.model = dummy_model(size)
        self.cache = self.model.new_cache(pages + 1, PAGE, CUDA)
        self.cache.data.normal_()

    @property
    def weights(self) -> tuple[int, int]:
        """Bytes of a layer's matrices, and of the head's."""
        config = self.model.config
        wide = (2 * config.heads + 2 * config.kv_heads) * config.head_dim + 3 * config.intermediate_size
        return 2 * config.hidden_size * wide, 2 * config.hidden_size * config.vocab_size

    def of(self, lengths: list[int]) -> None:
        """New inputs: rows of `lengths` tokens on pages in random order."""
        lens = torch.tensor(lengths)
        needed = [-(-length // PAGE) for length in lengths]
        table = torch.zeros(len(lengths) + 1, LONGEST // PAGE, dtype=torch.int32)
        ids = torch.randperm(self.cache.pages - 1)[: sum(needed)].int() + 1
        for row, pages in enumerate(ids.split(needed), 1):
            table[row, : len(pages)] = pages
        rows, last = torch.arange(1, len(lengths) + 1), lens - 1
        slots = table[rows, last // PAGE].long() * PAGE + last % PAGE
        tokens = torch.randint(5, self.model.vocab_size, (len(lengths),))
        given = (tensor.to(CUDA) for tensor in (tokens, last, slots, lens, rows, table))
        self.inputs = StepInputs(*given, columns=max(needed))
        self.plan = self.model.plan(BatchShape(len(lengths), (), max(lengths)))
        self.out = torch.empty(len(lengths), self.model.vocab_size, dtype=DTYPE, device=CUDA)

    def layers(self) -> torch.Tensor:
        return self.model.forward(self.inputs, self.plan, self.cache)

    def whole(self) -> None:
        self.model.write_logits(self.layers(), self.out)


def line(step: Step, name: str, rate: float) -> str:
    """One line of the table."""
    lengths, config = BATCHES[name], step.model.config
    step.of(lengths)
    layer, head = step.weights
    layer += sum(lengths) * 4 * config.kv_heads * config.head_dim
    layers, whole = seconds([step.layers]), seconds([step.whole])
    floors = layer / rate, (config.layers * layer + head) / rate
    times = [1e6 * t for t in (floors[0], layers / config.layers, floors[1], whole)]
    return f"| {name} | {times[0]:.1f} | {times[1]:.1f} | {times[2]:.0f} | {times[3]:.0f} | {whole / floors[1]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=list(BATCHES), metavar="BATCH")
    parser.add_argument("--size", choices=SHAPES, default="0.6B")
    options = parser.parse_args()
    names = options.batches
    step = Step(max(sum(-(-n // PAGE) for n in BATCHES[name]) for name in names), options.size)
    rate = bandwidth()
    with ahead():
        for name in {len(BATCHES[name]): name for name in names}.values():
            step.of(BATCHES[name])
            step.whole()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {rate / 1e12:.2f} TB/s; us\n")
    heads = ("batch", "floor of a layer", "a layer", "floor of a step", "a step", "over its floor")
    print("| " + " | ".join(heads) + " |\n|---|" + "---:|" * 5)
    for name in names:
        print(line(step, name, rate), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
