"""What the host tier saves and costs: the time of a prompt that is new, and of one that the device has given up.

`PYTHONPATH=.:benchmarks python benchmarks/kv_tiers.py [--model demo] [--tokens 448] [--rounds 9]` prints both, with a
host tier and without, as ratios of medians. Two engines whose KV memory holds one prompt take turns in one process;
each prompt is asked for one token, new ones first, then again when the others have taken its pages.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from gapless import LLM, SamplingParams

ONE = SamplingParams(temperature=0.0, max_tokens=1)
SIZE = 16
PROMPTS = 4
"""Prompts of one round: their KV is nearly four times the device's."""


def seconds(llm: LLM, prompt: list[int]) -> float:
    """The time of one request for one token."""
    begin = time.perf_counter()
    llm.generate({"prompt_token_ids": prompt}, ONE, use_tqdm=False)
    return time.perf_counter() - begin


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
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    options = {"device": args.device, "max_model_len": args.tokens + SIZE, "block_size": SIZE}
    options["num_gpu_blocks_override"] = args.tokens // SIZE + 6
    engines = {
        name: LLM(args.model, kv_tiers=tiers, **options) for name, tiers in (("none", ()), ("host", ("host:1GiB",)))
    }
    found = measured(engines, args.tokens, args.rounds)
    for kind in ("new", "again"):
        none, host = (statistics.median(found[name][kind]) for name in ("none", "host"))
        print(f"{kind:>5}: {1e3 * none:8.2f} ms without a tier, {1e3 * host:8.2f} ms with; {host / none:.3f}")
    stats = engines["host"].stats()
    print(f"loaded {stats.tier_loaded} pages, stored {stats.tier_stored}, refused {stats.tier_refused}")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
