"""Time of a decode batch's layers on a GPU, in Qwen3-0.6B's shape: 28 layers as one graph, and with the head after them.

    PYTHONPATH=.:benchmarks python benchmarks/gpu_layers.py [--batches 32x1300 ragged32]

The floor is the time of reading the weights and the keys and values once, at the rate of a large copy. Takes about half
a minute, most of it compiling.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from ab_depth import QWEN3_06B
from gpu_all import bandwidth
from gpu_timing import seconds

from gapless.kernels.all_triton import HALF_KERNELS
from gapless.model.config import read_model_config
from gapless.model.dense import DenseModel
from gapless.model.params import allocate, fill_dummy
from gapless.model.seam import BatchShape, KVCache, StepInputs

CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
PAGE, LONGEST = 16, 4096
_drawn = random.Random(1)
BATCHES = {f"{rows}x{length}": [length] * rows for rows in (8, 16, 24, 32) for length in (512, 1300, 4000)}
BATCHES |= {f"ragged{rows}": [_drawn.randint(100, 2500) for _ in range(rows)] for rows in (32, 16)}


def dummy_model() -> DenseModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_06B))
        config = read_model_config(Path(folder))
    params = allocate(config, DTYPE, CUDA)
    fill_dummy(params, 0)
    return DenseModel(config, params, LONGEST, HALF_KERNELS)


class Step:
    """Forwards of one model over a cache of random numbers."""

    def __init__(self, pages: int) -> None:
        self.model = dummy_model()
        self.cache = self.model.new_cache(pages + 1, PAGE, CUDA)
        self.cache.data.normal_()
        self.weights = self.model.config.layers * sum(
            linear.weight.nbytes
            for linear in (self.model.blocks[0][i] for i in (1, 3, 5, 6))  # type: ignore[union-attr]
        )

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
