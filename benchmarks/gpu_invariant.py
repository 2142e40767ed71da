"""What `--batch-invariant` costs on a GPU: tokens a second, time to the first token, and kernels beside the default's.

`PYTHONPATH=.:benchmarks python benchmarks/gpu_invariant.py [--out DIR]` prints short tables in under four minutes and,
with `--out`, leaves gpu_invariant.json there. The model is a dummy of Qwen3-0.6B's shape in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_all import Load, drive, engine
from gpu_timing import seconds
from torch import Tensor

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.core import EngineCore
from gapless.kernels import attention_triton, invariant_attention_triton, invariant_linear_triton

WEIGHTS = {"qkv": (4096, 1024), "output": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072),
           "head": (151936, 1024)}  # fmt: skip
"""(outputs, inputs) of Qwen3-0.6B"""
LOADS = (Load(1, 128, 256), Load(32, 256, 512), Load(256, 64, 128))
PROMPT = 2048
HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 16
BF16, GPU = torch.bfloat16, torch.device("cuda")
ALL: list[dict[str, Any]] = []


def say(kind: str, **what: Any) -> str:
    """A line of a table, kept for the JSON."""
    ALL.append({"kind": kind, **what})
    return "  ".join(f"{value:9.2f}" if isinstance(value, float) else f"{value!s:>9}" for value in what.values())


def first_token(core: EngineCore, seed: int) -> float:
    """Milliseconds from the submission of a prompt of PROMPT tokens to its first token."""
    prompt = np.random.default_rng(seed).integers(5, core.info.vocab_size, PROMPT).astype(np.int32)
    begin = time.perf_counter()
    core.submit(Request(seed, prompt, SamplingParams(temperature=0.0), 0, (), 0, PROMPT + 2))
    first = 0.0
    while core.has_work():
        if core.step()[1] and not first:
            first = time.perf_counter() - begin
    return 1e3 * first


def engines() -> Iterator[str]:
    """Tokens a second with the flag and without it, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"enable_prefix_caching": False, "max_model_len": 4096}
        arms = {name: engine(Path(folder), batch_invariant=name == "invariant", **options)
                for name in ("default", "invariant")}  # fmt: skip
        yield "rows, arm, tokens/s, step us, device us, idle %, graphs"
        for load in LOADS:
            speeds: dict[str, list[float]] = {name: [] for name in arms}
            for turn in range(2):
                for name, core in arms.items():
                    core.loop.log.forget()
                    got = drive(core, load, seed=turn)
                    speeds[name].append(got.tokens_per_s)
                    yield say("engine", rows=load.rows, arm=name, tokens_per_s=got.tokens_per_s, step_us=got.step_us,
                              device_us=got.device_us, idle=100 * got.idle, graphs=got.graphs)  # fmt: skip
            ratios = [b / a for a, b in zip(speeds["default"], speeds["invariant"], strict=True)]
            yield say("ratio", rows=load.rows, what="invariant / default", first=ratios[0], second=ratios[1])
        yield f"time to the first token of {PROMPT} tokens, ms: arm, median, least"
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(8):
            for name, core in arms.items():
                times[name].append(first_token(core, turn))
        for name, found in times.items():
            # The first may compile.
            yield say("first_token", arm=name, median=statistics.median(found[2:]), least=min(found))
        for core in arms.values():
            core.close()


def microseconds(run: Callable[..., Any], *args: Any) -> float:
    return 1e6 * seconds([partial(run, *args)] * 8)


def products() -> Iterator[str]:
    """Products of a layer and of the head, beside torch's. Weights of several layers, so that they come from memory."""
    yield "product, rows, torch us, invariant us, ratio, TB/s of the weight, TFLOP/s"
    for name, (outputs, inputs) in WEIGHTS.items():
        copies = 2 if name == "head" else 16
        weights = [torch.randn(outputs, inputs, device=GPU, dtype=BF16) for _ in range(copies)]
        for rows in (1, 16, 32, 256, 2048) if name != "head" else (1, 32, 256):
            x = torch.randn(rows, inputs, device=GPU, dtype=BF16)

            usual, ours = (
                1e6 * seconds([partial(product, x, weight, None) for weight in weights])
                for product in (torch.nn.functional.linear, invariant_linear_triton.product)
            )
            speed = 2 * outputs * inputs / ours / 1e6
            yield say("product", name=name, rows=rows, torch_us=usual, us=ours, ratio=ours / usual, tbs=speed,
                      tflops=rows * speed)  # fmt: skip


def paged(rows: int, length: int) -> tuple[Tensor, int, Tensor, Tensor, Tensor]:
    """A cache of one layer, and rows of `length` entries in it: cache, layer, page table, rows, lengths."""
    pages = -(-length // PAGE)
    cache = torch.randn(rows * pages + 1, 1, 2, PAGE, KV_HEADS, DIM, device=GPU, dtype=BF16)
    table = torch.zeros(rows, 4096 // PAGE, dtype=torch.int32, device=GPU)
    table[:, :pages] = 1 + torch.randperm(rows * pages, device=GPU).view(rows, pages).int()
    return cache, 0, table, torch.arange(rows, device=GPU), torch.full((rows,), length, device=GPU)


def attentions() -> Iterator[str]:
    yield "attention, rows, entries, default us, invariant us, ratio"
    for rows, length in ((1, 256), (1, 4000), (32, 512), (32, 4000), (256, 256), (256, 1024)):
        q = torch.randn(rows, HEADS, DIM, device=GPU, dtype=BF16)
        args = (q, *paged(rows, length), DIM**-0.5)
        usual = microseconds(attention_triton.decode_attention, *args)
        ours = microseconds(invariant_attention_triton.invariant_decode, *args)
        yield say("attention", what="decode", rows=rows, entries=length, default_us=usual, us=ours, ratio=ours / usual)
    for chunks, size, length in ((1, 2048, 2048), (4, 512, 512), (1, 512, 4000)):
        cache, layer, table, rows_, lens = paged(chunks, length)
        starts = torch.arange(chunks + 1, device=GPU) * size
        q = torch.randn(chunks * size, HEADS, DIM, device=GPU, dtype=BF16)
        chunk = (q, cache, layer, table, rows_, starts, lens, DIM**-0.5, size)
        usual = microseconds(attention_triton.prefill_attention, *chunk)
        ours = microseconds(invariant_attention_triton.invariant_prefill, *chunk)
        yield say("attention", what="prefill", rows=chunks * size, entries=length, default_us=usual, us=ours,
                  ratio=ours / usual)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for part in (products, attentions, engines):
        begin = time.perf_counter()
        for line in part():
            print(line, flush=True)
        print(f"({part.__name__}: {time.perf_counter() - begin:.0f} s)", flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_invariant.json").write_text(json.dumps(ALL, indent=1))


if __name__ == "__main__":
    main()
