"""Depth 1 against depth auto on real servers, with `gapless ab`: the demo model, and a dummy of Qwen3-0.6B's shape.

`PYTHONPATH=. python benchmarks/ab_depth.py --out DIR` runs all cases of a device (`--device cpu` or `cuda`)
and leaves DIR/<case>.md, .json and .html. Each case is one `gapless ab` command, which is printed; nothing is fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gapless.lab.arms import Arm, live
from gapless.lab.bench import LoadPlan
from gapless.lab.datasets import Workload
from gapless.lab.paired_load import PairedLoad
from gapless.lab.records import Sample
from gapless.lab.same_tokens import compare_tokens

ROOT = Path(__file__).resolve().parents[1]
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 4096,
    "dtype": "bfloat16", "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_17B = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
QWEN3_4B = QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
SHAPES = {"0.6B": QWEN3_06B, "1.7B": QWEN3_17B, "4B": QWEN3_4B, "8B": QWEN3_8B}
QWEN = "qwen3-06b"
ARMS = "-- --depth 1 -- --depth auto"


class Case(NamedTuple):
    """One comparison: ab's own flags, and what both servers are started with."""

    name: str
    load: str
    both: str


CPU = (
    Case("depth-demo-1", "--num-prompts 8 --input-len 64 --output-len 128 --max-concurrency 1",
         "--kv-cache-memory-bytes 256M"),
    Case("depth-demo-16", "--num-prompts 64 --input-len 64 --output-len 64 --max-concurrency 16",
         "--kv-cache-memory-bytes 256M"),
    Case("depth-qwen3-06b-4", "--num-prompts 8 --input-len 32 --output-len 32 --max-concurrency 4",
         "--threads 1 --model {qwen} --load-format dummy --kv-cache-memory-bytes 512M --max-model-len 512"),
)  # fmt: skip
CUDA = (
    Case("depth-demo-1", "--num-prompts 8 --input-len 64 --output-len 128 --max-concurrency 1",
         "--kv-cache-memory-bytes 1G"),
    Case("depth-demo-32", "--num-prompts 128 --input-len 64 --output-len 128 --max-concurrency 32",
         "--kv-cache-memory-bytes 1G"),
    Case("depth-qwen3-06b-1", "--num-prompts 2 --input-len 128 --output-len 256 --max-concurrency 1",
         "--model {qwen} --load-format dummy --kv-cache-memory-bytes 4G --max-model-len 1024"),
    Case("depth-qwen3-06b-32", "--num-prompts 32 --input-len 128 --output-len 256 --max-concurrency 32",
         "--model {qwen} --load-format dummy --kv-cache-memory-bytes 4G --max-model-len 1024"),
)  # fmt: skip


def make_qwen(directory: Path, positions: int = 4096, size: str = "0.6B") -> Path:
    """A checkpoint directory without weights, for texts of `positions` tokens; Qwen3's shape of a `size`.

    Every token id has a text of its own, so that answers can be compared.
    """
    directory.mkdir(parents=True, exist_ok=True)
    demo = ROOT / "gapless" / "demo" / "weights"
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"Ġ#{n}": n for n in range(SHAPES[size]["vocab_size"]) if n not in taken}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text((demo / "tokenizer_config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**SHAPES[size], "max_position_embeddings": positions}, indent=1))
    return directory


def command(case: Case, device: str, runs: int, quiet_wait: float) -> list[str]:
    """`gapless ab ...` as words."""
    text = (
        f"ab -n {runs} --quiet-wait {quiet_wait:g} {case.load} --out {case.name}-{device} "
        f"-- --device {device} {case.both.format(qwen=QWEN)} {ARMS}"
    )
    return [sys.executable, "-m", "gapless", *shlex.split(text)]


def batches(device: str) -> None:
    """Does a prompt's answer depend on how many others run beside it? One server at depth 1, and one at depth auto."""
    work = Workload(num_prompts=8, input_len=32, output_len=32)
    case = next(case for case in CPU if "qwen" in case.name)
    both = ["--device", device, *shlex.split(case.both.format(qwen=QWEN))]
    answers: dict[tuple[str, int], Sequence[Sample]] = {}
    for depth, limits in (("1", (1, 2, 4, 8)), ("auto", (1,))):
        arm = Arm("A", f"depth {depth}", flags=(*both, "--depth", depth))
        with live(arm) as server:
            for limit in limits:
                load = PairedLoad(LoadPlan(work=work, concurrency=limit))
                asyncio.run(load.meet((server, server)))
                answers[depth, limit] = [
                    sample._replace(place=8 * pair + sample.place)
                    for pair in range(4)
                    for sample in load.play(0, pair).run.samples
                ]
    for (depth, limit), said in answers.items():
        found = compare_tokens([(0, answers["1", 1], said)])
        other = f"{found['differ']} of {found['compared']} answers are not those of depth 1 with 1 at a time"
        print(f"depth {depth}, {limit} at a time: {other}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--quiet-wait", type=float, default=60.0)
    parser.add_argument("--batches", action="store_true", help="only look whether answers depend on the batch")
    parser.add_argument("--only", default="", help="cases with this in their names")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    failed = []
    # Everything happens in that folder by relative names: reports do not tell where this machine keeps its files.
    qwen = make_qwen(args.out.resolve() / QWEN)
    try:
        if args.batches:
            os.chdir(args.out)
            batches(args.device)
            return
        for case in CPU if args.device == "cpu" else CUDA:
            if args.only not in case.name:
                continue
            words = command(case, args.device, args.runs, args.quiet_wait)
            print("$ gapless", shlex.join(words[3:]), flush=True)
            if subprocess.run(words, cwd=args.out, check=False).returncode:
                failed.append(case.name)
    finally:
        shutil.rmtree(qwen)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
