"""Prints the kernels that `kinds` leaves to a first launch, in a process in which nothing is compiled or runs. Cases:
query heads, KV heads, tokens of a step, what drafts, if anything (ngram, draft_model), and an AMD GPU for others than
Hopper's, between commas."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import aot
import pytest
import torch
from tiny_models import tiny_config
from triton.runtime.jit import JITFunction

from gapless.base.config import EngineConfig
from gapless.base.speculative import MAX_DRAFTS
from gapless.device import CudaDevice, facts, open_device
from gapless.kernels import ahead_triton, linear
from gapless.kernels.views import Filters
from gapless.loop.spec import Sizes
from gapless.model.drafting.draft_model import DraftModel
from gapless.model.drafting.prompt_lookup import PromptLookup
from gapless.model.loader import load_model
from gapless.model.seam import BatchShape
from gapless.pace.draft_gate import ENDING
from gapless.step.graphs import CHUNK_COUNTS, CHUNK_TOKENS, ON_GPU
from gapless.step.keys import ForwardKey, ProgramKey, SampleKey
from gapless.step.kinds import kinds
from gapless.step.lanes.adjust import AdjustKey
from gapless.step.lanes.cut import CutKey
from gapless.step.lanes.mask import MaskKey, ReplyKey
from gapless.step.lanes.score import ScoreKey
from gapless.step.listing import LANE_SIZES
from gapless.step.logprobs import WIDTHS
from gapless.step.packet import PacketShape
from gapless.step.program import StepProgram
from gapless.step.speculation import Speculation
from gapless.testing.loops import loop_of

CONFIG = tiny_config(
    vocab_size=1519,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    head_dim=64,
    max_position_embeddings=4096,
    dtype="bfloat16",
)
SHAPE = Sizes(rows=256, max_len=4096, pages=300, page_size=16, step_tokens=2048, queue=8, slots=64)
DRAFTED = min(CudaDevice.caps.drafted_rows, SHAPE.rows)

new: list[str] = []
"""Kernels that the last program would have compiled."""


def compiled(
    self: JITFunction, key: str, signature: object, device: str, constants: object, options: Any, *rest: object
) -> object:
    """Stands in for compiling a variant."""
    warp = aot.triton.runtime.driver.active.target.warp_size
    assert options.num_warps * warp <= aot.MOST_THREADS, self.fn.__name__
    new.append(self.fn.__name__)
    return self.device_caches[device][0].setdefault(key, object())


def no_gpu(gpu: int | str) -> None:
    arch = aot.GPUS[gpu]
    facts.vendor, facts.capability, facts.capturing = lambda _: arch.vendor, lambda _: arch.capability, lambda: False
    facts.multiprocessors, facts.shared_memory = lambda _: arch.processors, lambda _: arch.shared_memory
    linear.packs = lambda weight: False
    # torch's products launch no kernel of ours, and what they compute is not looked at.
    linear.linear = lambda x, weight, bias: x.new_empty(len(x), len(weight))
    aot.use_driver(pytest.MonkeyPatch(), gpu)
    JITFunction._do_compile = compiled  # Triton's own private name: launches end in it
    JITFunction.__getitem__ = lambda self, grid: partial(self.run, grid=grid, warmup=True)


def replayed(graphs) -> Iterator[ProgramKey]:
    """What may become a graph."""
    yield from graphs.likely()
    plain = itertools.product(graphs.beside, CHUNK_COUNTS, CHUNK_TOKENS, (1,))
    drafted = itertools.product(graphs.drafted_beside, (1, ENDING), CHUNK_TOKENS[::4], graphs.shapes.places[-1:])
    going_on = itertools.product(graphs.beside, (1, 16), CHUNK_TOKENS[::4], (1,), (1, 16))
    for counts in (*plain, *drafted, *going_on):
        if (key := graphs.mixed_key(*counts)) is not None:
            places = key.batch.places
            yield from (key, SampleKey(key.packet.rows, key.samples, True, places, drafts=places > 1))


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


def eager_drafted(places: tuple[int, ...]) -> Iterator[ProgramKey]:
    """Steps with drafts that are not captured, whose rows ask for anything; some beside chunks."""
    for count, size, beside in itertools.product((1, 2, 3, 5, 8, 11, 16, 17, 24, 31, DRAFTED), places, (0, 1)):
        if beside and size < places[-1]:
            continue
        chunks, all_rows = ((0, 9 * count),) * beside, count + beside
        packet = PacketShape(all_rows, count, beside, beside, 9 * count * beside)
        yield ForwardKey(BatchShape(count * size, chunks, 4096, size), packet, all_rows)
        yield SampleKey(all_rows, all_rows, bool(beside), size, drafts=True)
        lane = next(lane for lane in LANE_SIZES if lane >= count)
        for some in (None, Filters(top_k=True, top_p=False), Filters(top_k=True, top_p=True)):
            yield AdjustKey(lane, some, all_rows, size)
        yield CutKey(lane * size, Filters(top_k=True, top_p=True), all_rows)
        yield from (ScoreKey(lane * size, width, all_rows) for width in WIDTHS)
        yield from (MaskKey(lane, (all_rows, size)), ReplyKey(lane, size - 1))


def main(heads: int, kv_heads: int, tokens: int, method: str, gpu: int | str = 90) -> None:
    no_gpu(gpu)
    config = CONFIG | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes = SHAPE._replace(step_tokens=tokens)
    from gapless.kernels import all_triton  # registers the operators

    device, kernels = open_device("cpu", 1), all_triton.HALF_KERNELS
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = load_model(EngineConfig(model=folder, load_format="dummy"), torch.device("cpu"), kernels)
    lookup, head = PromptLookup(MAX_DRAFTS, 2, 4), DraftModel(model, model, kernels, lambda cache: cache)
    drafter = {"": None, "ngram": (lookup, DRAFTED), "draft_model": (None, DRAFTED, head)}[method]
    speculation = Speculation(MAX_DRAFTS, *drafter) if drafter else None
    launcher = loop_of(device, model, sizes, kernels=kernels, mixed=ON_GPU, speculation=speculation).launcher
    places = launcher.graphs.shapes.places

    def run(key: ProgramKey, program: StepProgram = launcher.program) -> list[str]:
        new.clear()
        with torch.inference_mode(), ahead_triton.Zeros():
            program.of(key)(key, launcher.executor.buffers)
        return list(new)

    short = copy(launcher.program)
    short.model = short.model.first_layers()
    short.head = short.head and short.head.beside(short.model)
    ahead = sum(len(run(key, short)) for key in kinds(sizes.rows, short.outbox.rows, tokens, places, DRAFTED))
    eager_late = {str(key): names for key in eager_drafted(places) if (names := run(key))}
    late = eager_late | {str(key): names for key in replayed(launcher.graphs) if (names := run(key))}
    rare = [name for seed in range(60) for key in eager(seed) for name in run(key)]
    lanes = [key for key in replayed(launcher.graphs) if isinstance(key, (CutKey, ScoreKey))]
    print(json.dumps({"ahead": ahead, "late": late, "rare": rare, "lanes": len(lanes)}))


if __name__ == "__main__":
    for case in sys.argv[1:]:  # each in a fork: kernels that are compiled stay so
        if not (child := os.fork()):
            heads, kv_heads, tokens, *rest = case.split(",")
            main(int(heads), int(kv_heads), int(tokens), *rest)
            break
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
