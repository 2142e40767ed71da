"""Which kernels steps launch, on a machine without a GPU: prints those that `kinds` leaves to a first launch.

Arguments: query heads and KV heads of the model, and tokens of a step.
Run by test_ahead_triton.py in a process of its own: our operators are registered for the CPU here, and nothing is
compiled or runs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from copy import copy
from functools import partial
from pathlib import Path

import aot
import pytest
import torch
from tiny_models import tiny_config
from triton.runtime.jit import JITFunction

from gapless.base.config import EngineConfig
from gapless.device import facts, open_device
from gapless.kernels import ahead_triton, library_triton, linear
from gapless.loop.build import Sizes, build_loop
from gapless.model.loader import load_model
from gapless.model.seam import BatchShape
from gapless.step.graphs import CHUNKS, ON_GPU, TOKENS
from gapless.step.keys import CutKey, ForwardKey, ProgramKey, SampleKey, ScoreKey
from gapless.step.kinds import kinds
from gapless.step.packet import PacketShape
from gapless.step.program import StepProgram

CONFIG = tiny_config(
    vocab_size=1519,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    head_dim=64,
    max_position_embeddings=4096,
    dtype="bfloat16",
)
SIZES = Sizes(rows=256, max_len=4096, pages=300, page_size=16, step_tokens=2048, queue=8)

new: list[str] = []
"""Kernels that the last program would have compiled."""


def compiled(self: JITFunction, key: str, signature: object, device: str, *rest: object) -> object:
    """Stands in for compiling a variant."""
    new.append(self.fn.__name__)
    return self.device_caches[device][0].setdefault(key, object())


def no_gpu() -> None:
    facts.capability, facts.multiprocessors, facts.capturing = lambda _: (9, 0), lambda _: 132, lambda: False
    facts.shared_memory = lambda _: 227 << 10
    linear.packs = lambda weight: False
    # torch's products launch no kernel of ours, and what they compute is not looked at.
    linear.linear = lambda x, weight, bias: x.new_empty(len(x), len(weight))
    library_triton.DISPATCH_KEY = "CPU"
    aot.use_driver(pytest.MonkeyPatch(), 90)
    JITFunction._do_compile = compiled  # Triton's own private name: launches end in it
    JITFunction.__getitem__ = lambda self, grid: partial(self.run, grid=grid, warmup=True)


def replayed(graphs) -> Iterator[ProgramKey]:
    """What may become a graph."""
    yield from graphs.likely()
    for decode in graphs.beside:
        for chunks in CHUNKS:
            for tokens in TOKENS:
                key = graphs.mixed_key(decode, chunks, tokens)
                if key is not None:
                    yield from (key, SampleKey(key.batch.rows, key.samples, True))


def eager(seed: int) -> Iterator[ProgramKey]:
    """A step that fits no graph; the last chunk may stop before its prompt's end."""
    draw = random.Random(seed)
    decode, sizes = draw.randint(0, 200), [draw.choice((1, 3, 9, 17, 200)) for _ in range(draw.randint(0, 8))]
    rows = decode + len(sizes)
    if not rows:
        return
    ending = rows - (len(sizes) > 0 and draw.randint(0, 1))
    packet = PacketShape(rows, draw.randint(0, 9), draw.randint(0, len(sizes)), len(sizes), sum(sizes))
    chunks = tuple([(draw.choice((0, 512)), size) for size in sizes])
    yield ForwardKey(BatchShape(decode, chunks, 4096), packet, ending)
    yield SampleKey(rows, ending, bool(sizes))


def main(heads: int, kv_heads: int, tokens: int) -> None:
    no_gpu()
    config = CONFIG | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes = SIZES._replace(step_tokens=tokens)
    from gapless.kernels import all_triton  # registers the operators

    device, kernels = open_device("cpu", 1), all_triton.HALF_KERNELS
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = load_model(EngineConfig(model=folder, load_format="dummy"), torch.device("cpu"), kernels)
    launcher = build_loop(device, model, sizes, kernels=kernels, mixed=ON_GPU).launcher

    def run(key: ProgramKey, program: StepProgram = launcher.program) -> list[str]:
        new.clear()
        with torch.inference_mode(), ahead_triton.Zeros():
            program.of(key)(key, launcher.executor.buffers)
        return list(new)

    short = copy(launcher.program)
    short.model = short.model.first_layers()
    ahead = sum(len(run(key, short)) for key in kinds(sizes.rows, short.outbox.rows, tokens))
    late = {str(key): names for key in replayed(launcher.graphs) if (names := run(key))}
    rare = [name for seed in range(60) for key in eager(seed) for name in run(key)]
    lanes = [key for key in replayed(launcher.graphs) if isinstance(key, (CutKey, ScoreKey))]
    json.dump({"ahead": ahead, "late": late, "rare": rare, "lanes": len(lanes)}, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
