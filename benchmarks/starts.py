"""Measures where the time of a first start goes, with empty caches, and of a second, with the caches that it left.

    PYTHONPATH=.:benchmarks python benchmarks/starts.py --device cuda --rounds 3

The caches are those of compiled Triton kernels and of built C++. The model is a dummy of Qwen3-0.6B's shape in
bfloat16, or --model, and other settings of the engine are NAME=VALUE. Prints seconds by phase, medians with least and
most; "beyond imports" leaves out the interpreter and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ab_depth import QWEN3_06B
from peer_models import tokenizer

from gapless.lab.startup import Start, measure_start

IMPORTS = ("interpreter", "imports", "torch")
CACHES = {"TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "native"}


def make_model(folder: Path) -> str:
    """A checkpoint without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_06B))
    tokenizer(QWEN3_06B["vocab_size"] - 10).save(str(folder / "tokenizer.json"))
    return str(folder)


def round_of(options: dict[str, Any], folder: Path) -> tuple[Start, Start]:
    """A start with empty caches, and one with what it left."""
    for variable, name in CACHES.items():
        os.environ[variable] = str(folder / name)
    first = measure_start(options)
    print(f"empty caches: {said(first)}", flush=True)
    second = measure_start(options)
    print(f"filled: {said(second)}", flush=True)
    return first, second


def said(start: Start) -> str:
    return f"{start.total:.2f} s, of which " + ", ".join(f"{what} {seconds:.2f}" for what, seconds in start.phases)


def compiled(folder: Path) -> Counter[str]:
    """Variants in a cache of Triton's, by the name of their kernel."""
    return Counter(path.stem for path in folder.glob("*/*.cubin"))


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):8.2f} [{min(seconds):.2f}..{max(seconds):.2f}]"


def table(rounds: Sequence[tuple[Start, Start]]) -> list[str]:
    sides = list(zip(*rounds, strict=True))
    lines = [f"{'phase':<28}{'empty caches, s':>26}{'filled':>26}"]
    names = list(dict.fromkeys(what for side in sides for start in side for what, _ in start.phases))
    for name in names:
        cells = [spread([dict(start.phases).get(name, 0.0) for start in side]) for side in sides]
        lines.append(f"{name:<28}" + "".join(f"{cell:>26}" for cell in cells))
    for name, left_out in (("ready", ()), ("beyond imports", IMPORTS)):
        cells = [spread([beyond(start, left_out) for start in side]) for side in sides]
        lines.append(f"{name:<28}" + "".join(f"{cell:>26}" for cell in cells))
    return lines


def beyond(start: Start, left_out: Sequence[str]) -> float:
    return start.total - sum(seconds for what, seconds in start.phases if what in left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", help="a directory or a name; without it, the dummy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("settings", nargs="*", help="of the engine, as max_num_seqs=64")
    args = parser.parse_args()
    given = {name: json.loads(value) for name, _, value in (one.partition("=") for one in args.settings)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dummy = {} if args.model else {"model": make_model(folder / "model"), "load_format": "dummy"}
        options = {"model": args.model, "device": args.device, "kv_cache_memory_bytes": 1 << 30, **dummy, **given}
        rounds = [round_of(dict(options), folder / str(number)) for number in range(args.rounds)]
        kernels = compiled(folder / "0" / CACHES["TRITON_CACHE_DIR"])
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {args.device}")
    print("\n".join(table(rounds)))
    if kernels:
        print(f"{kernels.total()} kernels compiled:", ", ".join(f"{n} {name}" for name, n in kernels.most_common()))


if __name__ == "__main__":
    main()
