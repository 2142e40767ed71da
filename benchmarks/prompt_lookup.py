"""Prompt lookup on text that copies its prompt, ours or vLLM's: tokens/s of one engine, with drafts and without.

`python benchmarks/prompt_lookup.py gapless --model DIR --prompts FILE`, then the same with vllm: the first makes the
prompts, which are answers of the model itself, and the other gets the same. A model with random weights goes on in
cycles that its prompt has, as the share of right drafts shows. Each engine runs in this process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

BEGINS = [[5 + 7 * row, 9, 200, 300, 17, 42] for row in range(16)]
ANSWER, OUTPUT, LENGTH = 1024, 512, 2048
LOOKUP = {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
METHODS = {"gapless": "ngram", "vllm": "ngram_gpu"}


def engine(name: str, model: str, drafts: bool) -> Any:
    options: dict[str, Any] = {
        "max_model_len": LENGTH, "max_num_seqs": len(BEGINS), "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 12 << 30,
    }  # fmt: skip
    if drafts:
        options["speculative_config"] = {"method": METHODS[name], **LOOKUP}
    if name == "gapless":
        from gapless import LLM

        return LLM(model, device="cuda", **options)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM as VllmLLM  # type: ignore[import-not-found]

    return VllmLLM(model, gpu_memory_utilization=0.3, disable_log_stats=False, **options)


def play(name: str, llm: Any, prompts: list[list[int]], output: int) -> tuple[list[list[int]], float]:
    """The greedy answers of `output` tokens, and tokens/s."""
    if name == "gapless":
        from gapless import SamplingParams
    else:
        from vllm import SamplingParams
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    return answers, sum(map(len, answers)) / seconds


def drafts_of(name: str, llm: Any) -> tuple[int, int]:
    """The drafts since the start, and those that were right."""
    if name == "gapless":
        stats = llm.stats()
        return stats.draft_tokens, sum(stats.accepted)
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return tuple(values.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in ("draft", "accepted"))


def measure(options: argparse.Namespace, drafts: bool) -> None:
    name, llm = options.engine, engine(options.engine, options.model, drafts)
    if not options.prompts.exists():
        answers, _ = play(name, llm, BEGINS, ANSWER)
        options.prompts.write_text(json.dumps([begin + answer for begin, answer in zip(BEGINS, answers, strict=True)]))
    prompts = json.loads(options.prompts.read_text())
    for rows in (1, len(prompts)):
        play(name, llm, prompts[:rows], OUTPUT)
        before = drafts_of(name, llm)
        rates = [play(name, llm, prompts[:rows], OUTPUT)[1] for _ in range(options.rounds)]
        made, right = (now - then for then, now in zip(before, drafts_of(name, llm), strict=True))
        found = f"{statistics.median(rates):,.0f} tokens/s [{min(rates):,.0f} to {max(rates):,.0f}]"
        print(
            f"{name}, {rows} rows, {LOOKUP['num_speculative_tokens'] * drafts} drafts: {found}, {right} of {made} right"
        )
    if name == "gapless":
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=tuple(METHODS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--drafts", type=int, nargs="+", choices=(0, 1), default=(0, 1), help="without, and with")
    options = parser.parse_args()
    for drafts in options.drafts:
        measure(options, bool(drafts))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
