"""What asking memory ahead gives on a CPU: the C++ kernels as they are beside copies with one of their rules changed.

`python benchmarks/cpu_ahead.py [--threads N] [--rounds N]` prints the times of Qwen3-0.6B's matrices at one row and of
its decode attention, and each copy's time over that of the kernels as they are. All run in turns in one process, over
weights and pages that no cache holds; a figure is the lower quartile of the rounds. All give the same bits.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cpu_kernels import COLD_BYTES, DTYPE, PAGE, SHAPES, randn

from gapless.device import build
from gapless.kernels import native

SHAPE = SHAPES[1]
AS_IT_IS = "as it is"
ASK_ONE = ("linear_dots.cpp", "few = in_memory && (rows > 1 || ONE_TOO)", "few = in_memory && (rows > 1 || !ONE_TOO)")
NO_ASK = ("attention.cpp", "__builtin_prefetch(line + i, 0, 2);", ";")
NEAR = ("attention.cpp", "__builtin_prefetch(line + i, 0, 2);", "__builtin_prefetch(line + i, 0, 3);")
NOT_AFTER = ("attention.cpp", "next.keys : after ? after : block.keys", "next.keys : block.keys")
LINEAR = {"one row the other way": [ASK_ONE]}
ATTENTION = {"nothing asked": [NO_ASK], "into the first cache": [NEAR], "not past a span": [NOT_AFTER]}
CONTEXTS = ((32, 1000), (32, 192), (8, 1000))


class Case(NamedTuple):
    """`call` takes the operators of one copy."""

    name: str
    call: Callable[[Any], torch.Tensor]
    bytes: int


def copy(name: str, edits: list[tuple[str, str, str]]) -> Any:
    """The operators of a copy whose sources are edited: (file, text, text in its place)."""
    library = f"gapless_{''.join(filter(str.isalnum, name))}"
    with tempfile.TemporaryDirectory() as folder:
        for source in native.SOURCES:
            shutil.copy(source, folder)
        (Path(folder) / "variant.h").write_text(f"#pragma once\n#define GAPLESS_LIBRARY {library}\n")
        for file, old, new in edits:
            text = (Path(folder) / file).read_text()
            assert old in text, f"{file} has no {old!r}"
            (Path(folder) / file).write_text(text.replace(old, new))
        outcome = build.operators(library, sorted(Path(folder).iterdir()))
    if outcome.library is None:
        raise SystemExit(f"{name} cannot be built: {outcome.reason}")
    return getattr(torch.ops, library)


def linear_cases() -> Iterator[Case]:
    for name, (outputs, inputs) in SHAPE.matrices.items():
        size = outputs * inputs * DTYPE.itemsize
        packed = [native.NativeLinear(randn(outputs, inputs)).weight for _ in range(max(1, COLD_BYTES // size))]
        weights, x = itertools.cycle(packed), randn(1, inputs)
        call = lambda ops, w=weights, x=x, n=outputs: ops.linear(x, next(w), n, None, native.Way.BF16_DOT)  # noqa: E731
        yield Case(f"linear {name}, 1 row", call, size)


def attention_cases() -> Iterator[Case]:
    for rows, context in CONTEXTS:
        pages = -(-context // PAGE)
        cache = randn(rows * pages + 1, 2, 2, PAGE, SHAPE.kv_heads, SHAPE.dim)
        table = (torch.randperm(rows * pages) + 1).view(rows, pages).int()
        q = randn(rows, SHAPE.heads + 2 * SHAPE.kv_heads, SHAPE.dim)[:, : SHAPE.heads]
        given = (table, torch.arange(rows), torch.full((rows,), context), SHAPE.dim**-0.5)
        layers = itertools.cycle((0, 1))
        call = lambda ops, q=q, c=cache, a=given, n=layers: ops.decode_attention(q, c, next(n), *a)  # noqa: E731
        yield Case(f"decode, {rows} x {context}", call, rows * context * 2 * SHAPE.kv_heads * SHAPE.dim * 2)


def measured(case: Case, copies: dict[str, Any], rounds: int) -> dict[str, float]:
    """Seconds of a call."""
    found: dict[str, list[float]] = {name: [] for name in copies}
    repeats = max(1, int(3e-3 / (case.bytes / 15e9)))
    for turn in range(rounds):
        for name in sorted(copies, reverse=turn % 2 == 1):
            time.sleep(1e-3)  # the threads of the copy before look for work for a while
            start = time.perf_counter()
            for _ in range(repeats):
                case.call(copies[name])
            found[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.quantiles(times, n=4)[0] for name, times in found.items()}


def report(cases: Iterator[Case], copies: dict[str, Any], rounds: int) -> None:
    for case in cases:
        times = measured(case, copies, rounds)
        mine = times.pop(AS_IT_IS)
        others = ", ".join(f"{name} {seconds / mine:.2f} x" for name, seconds in times.items())
        print(f"{case.name:22} {mine * 1e6:9.1f} us {case.bytes / mine / 1e9:5.1f} GB/s; {others}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if native.product().path not in ("amx", "bf16_dot"):
        raise SystemExit(f"only for processors with AVX512-BF16: {native.product()}")
    kernels = {AS_IT_IS: torch.ops.gapless}
    for cases, edits in ((linear_cases, LINEAR), (attention_cases, ATTENTION)):
        copies = kernels | {name: copy(name, changed) for name, changed in edits.items()}
        report(cases(), copies, options.rounds)


if __name__ == "__main__":
    main()
