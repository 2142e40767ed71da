"""What tiers save and cost: the time of a prompt that is new, and of one that the device has given up.

`PYTHONPATH=.:benchmarks python benchmarks/kv_tiers.py [--model demo] [--tokens 448] [--rounds 9] [--host 1GiB]`
prints both (the models 0.6B and 8B are dummies of Qwen3's shapes), without a tier, with a host tier that holds all, and
with a disk below one that holds a prompt (or, instead of the disk, each `--tier`, such as redis://127.0.0.1:6379/0), as
ratios of medians. Engines whose KV memory holds one prompt take turns in one process; each prompt is asked for one
token, new ones first, then again when the others have taken its pages.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from ab_depth import SHAPES, make_qwen

from gapless import LLM, SamplingParams
from gapless.base.tiers import parse_bytes

ONE = SamplingParams(temperature=0.0, max_tokens=1)
LITTLE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SIZE = 16
PROMPTS = 4
"""Prompts of one round: their KV is nearly four times the device's."""


def seconds(llm: LLM, prompt: list[int]) -> float:
    """The time of one request for one token. Its pages are stored, beside others, before the next one takes them."""
    begin = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, ONE, use_tqdm=False)
    took = time.perf_counter() - begin
    stored = -1
    while (stats := llm.stats()).tier_storing or stats.tier_stored > stored:
        stored = stats.tier_stored
        llm.generate({"prompt_token_ids": [3]}, LITTLE, use_tqdm=False)
    return took


def measured(engines: dict[str, LLM], tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by engine, of new prompts and of those that come again; the first round is left out."""
    found = {name: {"new": [], "again": []} for name in engines}
    draw = random.Random(1)
    for count in range(1 + rounds):
        prompts = [[draw.randrange(3, 200) for _ in range(tokens)] for _ in range(PROMPTS)]
        for kind in ("new", "again"):
            for prompt in prompts:
                for name in sorted(engines, reverse=count % 2 > 0):
                    took = seconds(engines[name], prompt)
                    if count:
                        found[name][kind].append(took)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=448)
    parser.add_argument("--directory", help="where the disk tier is; default: that of temporary files")
    parser.add_argument("--tier", action="append", help="below the host tier, instead of a disk; may be repeated")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--host", default="1GiB", help="the host tier that holds all, and the disk tier")
    args = parser.parse_args()
    options = {"device": args.device, "max_model_len": args.tokens + SIZE, "block_size": SIZE}
    options["num_gpu_blocks_override"] = args.tokens // SIZE + 6
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        model = args.model
        if model in SHAPES:
            path = make_qwen(Path(directory) / model, args.tokens + SIZE, model)
            model, options["load_format"] = str(path), "dummy"
        engines = {"none": LLM(model, **options), "host": LLM(model, kv_tiers=(f"host:{args.host}",), **options)}
        page = parse_bytes(args.host, args.host) // engines["host"].stats().tier_slots + 1
        one_prompt = (args.tokens // SIZE + 4) * page
        for tier in args.tier or [f"disk:{directory}/kv:{args.host}"]:
            engines[tier.partition(":")[0]] = LLM(model, kv_tiers=(f"host:{one_prompt}", tier), **options)
        report(engines, measured(engines, args.tokens, args.rounds))
        for llm in engines.values():
            llm.close()


def report(engines: dict[str, LLM], found: dict[str, dict[str, list[float]]]) -> None:
    """Print medians and their ratios to those without a tier, and what the tiers did."""
    for kind in ("new", "again"):
        none, *tiers = (statistics.median(found[name][kind]) for name in engines)
        columns = [
            f"{1e3 * one:8.2f} ms with {name} ({one / none:.3f})"
            for name, one in zip([*engines][1:], tiers, strict=True)
        ]
        print(f"{kind:>5}: {1e3 * none:8.2f} ms without a tier,", ", ".join(columns))
    for name, llm in engines.items():
        stats = llm.stats()
        if name != "none":
            print(f"{name}: the host tier loaded {stats.tier_loaded} pages, stored {stats.tier_stored}")
        if stats.lower_hits:
            dropped = stats.lower_dropped_busy[0] + stats.lower_dropped_slow[0] + stats.lower_dropped_gone[0]
            print(f"{name}: loaded {stats.lower_loaded[0]} from it, stored {stats.lower_stored[0]}, left out {dropped}")


if __name__ == "__main__":
    main()
