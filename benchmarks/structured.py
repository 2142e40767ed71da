"""What forms of output cost: tokens a second of a batch in which some, or all, answers have a form, beside one in which
none has; and the time to the first token of a form that was not seen before. With `--drafts`: what prompt lookup gives
where all answers have a form, beside an engine without drafts; their tokens are equal.

`PYTHONPATH=.:benchmarks python benchmarks/structured.py [--device cuda] [--rows 32 256] [--drafts 4] [--out FILE]`.
Arms alternate in one process. Forms are four JSON schemas of arrays that no answer completes, so that all answers are
of one length. Models: the demo model, and on a GPU a dummy of Qwen3-0.6B's shape with a vocabulary of as many made-up
words.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peer_models

from gapless import LLM, SamplingParams
from gapless.base.structured import StructuredOutputs
from gapless.lab import environment

SHARES = (0.2, 1.0)
MANY = {"type": "array", "minItems": 1_000}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["owner", "editor", "guest"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    MANY | {"items": {"type": "integer"}},
    MANY | {"items": PERSON},
    MANY | {"items": {"type": "string", "maxLength": 20}},
    MANY | {"items": {"anyOf": [{"type": "boolean"}, {"enum": ["north", "south", "east", "west"]}]}},
)


class Run(NamedTuple):
    """One batch: all its tokens, and what became of masks."""

    tokens_per_s: float
    step_us: float
    held: float
    """Share of the structured rows' steps in which one was held"""
    mask_us: float
    """Time from reading a token to having written the mask of the next one"""


def play(llm: LLM, rows: int, share: float, options: argparse.Namespace, seed: int) -> Run:
    return answered(llm, rows, share, options, seed)[0]


def answered(llm: LLM, rows: int, share: float, options: argparse.Namespace, seed: int) -> tuple[Run, list[list[int]]]:
    """`rows` greedy answers of one length at once, this share of them with a form."""
    random, vocab = np.random.default_rng(seed), llm.info.vocab_size
    prompts = [{"prompt_token_ids": random.integers(200, vocab, options.prompt).tolist()} for _ in range(rows)]
    forms = [StructuredOutputs(json=schema) for schema in SCHEMAS]
    params = [
        SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
        if index >= round(share * rows)
        else SamplingParams(temperature=0, max_tokens=options.output, structured_outputs=forms[index % len(forms)])
        for index in range(rows)
    ]
    before, begun = llm.stats(), time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - begun, llm.stats()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    lengths = list(map(len, tokens))
    assert min(lengths) == options.output, f"an answer has {min(lengths)} tokens"
    masks, steps = after.masks.written - before.masks.written, after.steps.steps - before.steps.steps
    held = after.steps.held_rows - before.steps.held_rows
    mask_us = (after.masks.ns - before.masks.ns) / max(1, masks) / 1e3
    return Run(sum(lengths) / seconds, seconds / steps * 1e6, held / max(1, held + masks), mask_us), tokens


def beside(llm: LLM, rows: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the arms A B C A B C, after a round of each that captures and compiles."""
    arms = (0.0, *SHARES)
    runs: dict[float, list[Run]] = {share: [] for share in arms}
    for turn in range(-1, options.rounds):
        for share in arms:
            run = play(llm, rows, share, options, turn + 1)
            if turn >= 0:
                runs[share].append(run)
    return [described(rows, share, runs) for share in SHARES]


def described(rows: int, share: float, runs: dict[float, list[Run]]) -> dict[str, Any]:
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(runs[0.0], runs[share], strict=True)]
    none, some = (Run(*map(statistics.median, zip(*runs[arm], strict=True))) for arm in (0.0, share))
    return {
        "rows": rows,
        "share": share,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "none": none._asdict(),
        "some": some._asdict(),
    }


def with_drafts(plain: LLM, drafted: LLM, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure batches in which all answers have a form, A B A B, after a round of each."""
    ratios, begun = [], (plain.stats(), drafted.stats())
    for turn in range(-1, options.rounds):
        (a, tokens), (b, same) = (answered(llm, rows, 1.0, options, turn + 1) for llm in (plain, drafted))
        assert tokens == same or options.device == "cuda", "drafts have changed a token"
        if turn >= 0:
            ratios.append(b.tokens_per_s / a.tokens_per_s)
    before, after = begun[1], drafted.stats()
    drafts, right = after.drafts.draft_tokens - before.drafts.draft_tokens, after.drafts.right - before.drafts.right
    return {
        "rows": rows,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "steps": [
            llm.stats().steps.steps - first.steps.steps for llm, first in zip((plain, drafted), begun, strict=True)
        ],
        "drafts": drafts,
        "accepted": right,
    }


def compare_drafts(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    speculative = {"method": "ngram", "num_speculative_tokens": options.drafts, **lookup}
    with engine(options, folder) as plain, engine(options, folder, speculative_config=speculative) as drafted:
        found = [with_drafts(plain, drafted, rows, options) for rows in options.rows]
    print("| rows | tokens/s with drafts : without | steps, without : with | drafts | right |")
    print("|---:|---:|---:|---:|---:|")
    for line in found:
        (low, high), right = line["range"], line["accepted"] / max(1, line["drafts"])
        print(
            f"| {line['rows']} | {line['ratio']:.2f} [{low:.2f}..{high:.2f}] "
            f"| {line['steps'][0]} : {line['steps'][1]} | {line['drafts']} | {right:.0%} |"
        )
    return found


def first_tokens(llm: LLM, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds to the first token, alone: without a form, and with one that was never seen."""
    times: tuple[list[float], list[float]] = ([], [])
    prompt = {"prompt_token_ids": list(range(200, 200 + options.prompt))}
    for turn in range(-2, 20):
        fresh = PERSON | {"title": f"form {turn}"}
        for arm, form in enumerate((None, StructuredOutputs(json={"properties": {f"key{turn}": fresh}, **fresh}))):
            params = SamplingParams(temperature=0, max_tokens=1, structured_outputs=form)
            begun = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            if turn >= 0:
                times[arm].append(1e3 * (time.perf_counter() - begun))
    without, with_form = map(statistics.median, times)
    return {"without_ms": without, "with_ms": with_form}


def engine(options: argparse.Namespace, folder: Path, **more: Any) -> LLM:
    config: dict[str, Any] = {
        "device": options.device, "max_num_seqs": max(options.rows), "enable_prefix_caching": False,
        "max_adjusted_seqs": max(options.rows), "max_model_len": options.prompt + options.output,
        **more,
    }  # fmt: skip
    if options.device == "cpu":
        return LLM("demo", **config)
    shape, words = peer_models.MODELS["small"]
    (folder / "config.json").write_text(json.dumps({**peer_models.SHARED, **shape, "eos_token_id": words}))
    peer_models.tokenizer(words).save(str(folder / "tokenizer.json"))
    return LLM(str(folder), load_format="dummy", kv_cache_memory_bytes=16 << 30, **config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=0, help="compare with drafts of N tokens instead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"host": environment.describe_host(), "device": options.device, "batches": []}
    if options.drafts:
        with tempfile.TemporaryDirectory() as folder:
            found["drafts"] = compare_drafts(options, Path(folder))
        write(options.out, found)
        return
    with tempfile.TemporaryDirectory() as folder, engine(options, Path(folder)) as llm:
        gc.collect()
        gc.freeze()  # as a server's engine does: a collection that walks all that the start made takes 90 ms
        print("| rows | with a form | tokens/s without | with | ratio | held | mask, us |")
        print("|---:|---:|---:|---:|---:|---:|---:|")
        for rows in options.rows:
            for line in beside(llm, rows, options):
                found["batches"].append({"output": options.output, **line})
                none, some, (low, high) = line["none"], line["some"], line["range"]
                print(
                    f"| {rows} | {line['share']:.0%} | {none['tokens_per_s']:,.0f} | {some['tokens_per_s']:,.0f} "
                    f"| {line['ratio']:.3f} [{low:.3f}..{high:.3f}] | {some['held']:.2%} | {some['mask_us']:.0f} |",
                    flush=True,
                )
        found["first"] = first = first_tokens(llm, options)
        print(f"first token: {first['without_ms']:.2f} ms without a form, {first['with_ms']:.2f} ms with a new one")
    write(options.out, found)


def write(path: Path | None, found: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
