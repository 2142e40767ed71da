"""What steps with drafts give: tokens a second beside an engine without, in turn in one process; all tokens are equal.

`PYTHONPATH=.:benchmarks python benchmarks/speculation.py [--device cuda] [--drafts 4] [--works ...] [--out FILE]`. An
oracle knows the answers, and errs at each place with a set probability: so the machinery is measured, and no drafter.
Prompt lookup, the head and the demo model as its own draft model are measured on the demo model's own tasks.

`prompt` is prompt lookup on text that copies its prompt, by a model of any size with random weights. Greedy answers of
such a model run into a cycle before long. So it first answers for `--warm` tokens; these are the prompt of the request
that is measured, which goes on with the cycle. How much of it is really copied is the share of right drafts, which the
table says; where that is far from 100 %, the model has not come to a cycle, and `--warm` should be longer. `noise` is
prompt lookup on random tokens, whose drafts are never right: what the machinery costs rows that gain nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import unittest.mock
from pathlib import Path
from typing import Any, NamedTuple

import peer_models
import torch
from torch import Tensor

from examples.demo_model import problems
from examples.demo_model.decode import prompt_text
from examples.demo_model.evaluate import as_chat
from gapless import LLM, SamplingParams
from gapless.demo import weights_dir
from gapless.engine import wiring
from gapless.kernels.layout import ACTIVE, DRAFTED, DRAFTS, LENGTH, MAX_LEN
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.lab import environment
from gapless.pace.draft_gate import WITHOUT_DRAFTS, DraftGate, StepKind, Verify, kind_of
from gapless.step import speculation

NEVER = 3
"""A token that no answer here has."""
PROMPT = [5, 9, 200, 300, 17, 42] * 4


class Oracle:
    """Drafts a stored answer, in which each place is wrong with probability 1 - `right`."""

    def __init__(self, drafts: int, right: float, device: str) -> None:
        self.answer = torch.zeros(1 << 14, dtype=torch.long, device=device)
        self._drafts, self._right = drafts, right
        self._places = torch.arange(drafts, device=device)

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        if not self._right:  # the same wrong token everywhere; other oracles cost a small model's step a third
            last = tables.params[:, MAX_LEN] - 1
            tables.state[:, DRAFTED].copy_(torch.minimum(tables.state[:, LENGTH] + self._drafts, last))
            at = (tables.state[:, LENGTH, None] + self._places).clamp(max=tables.history.shape[1] - 1)
            tables.history.scatter_(1, at.long(), NEVER)
            return
        rows = rows.long()
        state, params = (table.index_select(0, rows).long() for table in tables[:2])
        length = state[:, LENGTH]
        most = torch.minimum(params[:, DRAFTS], params[:, MAX_LEN] - 1 - length).clamp(0, self._drafts)
        most = torch.where(state[:, ACTIVE] != 0, most, 0)
        for place in range(self._drafts):
            at = (length + place).clamp(max=tables.history.shape[1] - 1)
            wrong = (at * 2_654_435_761 + 977) % 1000 >= 1000 * self._right
            token = torch.where(wrong, (self.answer[at] + 1) % 1000, self.answer[at])
            kept = tables.history[rows, at]
            tables.history.index_put_((rows, at), torch.where(place < most, token.int(), kept))
        drafted = torch.where(params[:, DRAFTS] > 0, length + most, state[:, DRAFTED])
        tables.state[:, DRAFTED].index_copy_(0, rows, drafted.int())


class Run(NamedTuple):
    """One batch."""

    tokens_per_s: float
    steps: int
    drafts: int
    accepted: int
    tokens: list[list[int]]
    after_first: float
    """Seconds from first tokens to last ones, of all answers"""


def play(llm: LLM, prompts: list[Any], output: int, ends: bool, temperature: float = 0.0) -> Run:
    """Answer chats, or prompts as they are; up to the end of each answer, or `output` tokens."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=output, ignore_eos=not ends)
    before, begun = llm.stats(), time.perf_counter()
    asked = llm.chat if isinstance(prompts[0], list) else llm.generate
    outputs = asked(prompts, params, use_tqdm=False)
    seconds, after = time.perf_counter() - begun, llm.stats()
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    accepted = after.drafts.right - before.drafts.right
    drafts = after.drafts.draft_tokens - before.drafts.draft_tokens
    steps, after_first = after.sizes.decode - before.sizes.decode, [one.metrics.generation_seconds for one in outputs]
    return Run(sum(map(len, tokens)) / seconds, steps, drafts, accepted, tokens, sum(filter(None, after_first)))


def beside(
    plain: LLM, drafted: LLM, prompts: list[Any], output: int, ends: bool, turns: range, temperature: float = 0.0
) -> dict[str, Any]:
    """Measure A B A B. Turns below 0 do not count: the shape of a prompt is captured at its second miss."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for turn in turns:
        for llm, found in zip((plain, drafted), runs, strict=True):
            run = play(llm, prompts, output, ends, temperature)
            if turn >= 0:
                found.append(run)
    assert all(a.tokens == b.tokens for a, b in zip(*runs, strict=True)) or plain.info.device == "cuda"
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in zip(*runs, strict=True)]
    last = runs[1][-1]
    return {
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "tokens_per_s": [statistics.median(run.tokens_per_s for run in found) for found in runs],
        "tokens": sum(map(len, last.tokens)),
        "after_first": [statistics.median(run.after_first for run in found) for found in runs],
        "steps": [found[-1].steps for found in runs],
        "drafts": last.drafts,
        "accepted": last.accepted,
    }


def model_of(name: str, folder: Path) -> dict[str, Any]:
    if name == "demo":
        return {"model": "demo", "max_model_len": 512}
    shape, words = peer_models.MODELS["small"]
    (folder / "config.json").write_text(json.dumps({**peer_models.SHARED, **shape, "eos_token_id": words}))
    peer_models.tokenizer(words).save(str(folder / "tokenizer.json"))
    return {"model": str(folder), "load_format": "dummy", "max_model_len": 512}


def shared_by_arms(options: argparse.Namespace) -> dict[str, Any]:
    return {"device": options.device, "max_num_seqs": max(options.rows), "enable_prefix_caching": False}


def engines(
    options: argparse.Namespace, config: dict[str, Any], oracle: Oracle | None, method: str = "ngram"
) -> tuple[LLM, LLM]:
    return LLM(**config, **shared_by_arms(options)), drafting(options, config, oracle, method, options.drafts)


def drafting(
    options: argparse.Namespace, config: dict[str, Any], oracle: Oracle | None, method: str, drafts: int
) -> LLM:
    speculative = {"method": method, "num_speculative_tokens": drafts}
    if method == "ngram":
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
    if method == "draft_model":
        speculative["model"] = str(weights_dir())
    made = wiring.speculation
    if oracle is not None:
        wiring.speculation = lambda *asked: (own := made(*asked)) and own._replace(drafter=oracle)
    try:
        return LLM(**config, **shared_by_arms(options), speculative_config=speculative)
    finally:
        wiring.speculation = made


def with_numbers(options: argparse.Namespace, right: float) -> list[dict[str, Any]]:
    """Steps that run as many of eight drafts as pay best, beside steps that run all or none."""
    oracle, found, config = Oracle(8, right, options.device), [], model_of("demo", Path())
    with unittest.mock.patch.object(speculation, "FEWER", ()):
        fixed = drafting(options, config, oracle, "ngram", 8)
    with fixed, drafting(options, config, oracle, "ngram", 8) as free:
        for rows in (rows for rows in options.rows if rows <= 8):
            prompts = [{"prompt_token_ids": PROMPT}] * rows
            answer = play(fixed, prompts[:1], options.output, ends=False).tokens[0]
            oracle.answer[len(PROMPT) : len(PROMPT) + options.output] = torch.tensor(answer)
            line = beside(fixed, free, prompts, options.output, False, range(-2, options.rounds))
            found.append({"work": f"demo, oracle {right:g}, 2, 4 or 8 drafts beside 8", "rows": rows, **line})
    return found


def with_oracle(options: argparse.Namespace, name: str, right: float, folder: Path) -> list[dict[str, Any]]:
    oracle, found = Oracle(options.drafts, right, options.device), []
    plain, drafted = engines(options, model_of(name, folder), oracle)
    with plain, drafted:
        output = options.output if name == "demo" or options.device == "cuda" else 64
        for rows in options.rows if name == "demo" or options.device == "cuda" else (1,):
            prompts = [{"prompt_token_ids": PROMPT}] * rows
            answer = play(plain, prompts[:1], output, ends=False).tokens[0]
            oracle.answer[len(PROMPT) : len(PROMPT) + output] = torch.tensor(answer)
            line = beside(plain, drafted, prompts, output, False, range(-2, options.rounds))
            found.append({"work": f"{name}, oracle {right:g}", "rows": rows, **line})
    return found


def on_copies(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows that go on with a cycle that their own prompts are in, each from another beginning."""
    found = []
    for name in options.models:
        config = {**model_of(name, folder), "max_model_len": options.warm + options.output + 64}
        plain, drafted = engines(options, config, None)
        with plain, drafted:
            begins = [[5 + 7 * row, 9, 200, 300, 17, 42] for row in range(max(options.rows))]
            asked = [{"prompt_token_ids": begin} for begin in begins]
            answers = play(plain, asked, options.warm, ends=False).tokens
            for rows in options.rows:
                pairs = zip(begins[:rows], answers[:rows], strict=True)
                prompts = [{"prompt_token_ids": [*begin, *answer]} for begin, answer in pairs]
                line = beside(plain, drafted, prompts, options.output, False, range(-2, options.rounds))
                found.append({"work": f"{name}, prompt copied", "rows": rows, **line})
    return found


def on_noise(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of random tokens, drawn by a model with random weights: prompt lookup finds nothing that comes again."""
    found = []
    for name in options.models:
        plain, drafted = engines(options, model_of(name, folder), None)
        with plain, drafted:
            for rows in options.rows:
                prompts = [{"prompt_token_ids": [5 + 7 * row, 9, 200, 300, 17, 42]} for row in range(rows)]
                line = beside(
                    plain, drafted, prompts, options.output, False, range(-2, options.rounds), temperature=1.0
                )
                found.append({"work": f"{name}, random tokens", "rows": rows, **line})
    return found


def on_tasks(options: argparse.Namespace, method: str) -> list[dict[str, Any]]:
    """The demo model's tasks, one row at a time, those of the head on problems that it was not trained on. The ratio is
    that of the time for all of them, and of the time after their first tokens."""
    names = {"ngram": "", "suffix": ", suffixes", "eagle3": ", head", "draft_model": ", drafted by itself"}
    found, name = [], names[method]
    plain, drafted = engines(options, {"model": "demo", "max_model_len": 512}, None, method)
    with plain, drafted:
        for family, make in problems.FAMILIES.items():
            rng = random.Random(7)
            prompts: list[Any] = [[{"role": "user", "content": make(rng).question}] for _ in range(24)]
            if method in ("eagle3", "draft_model"):  # with their tools, and none that it was trained on
                prompts = [prompt_text(as_chat(problem)) for problem in problems.held_out_problems(family, 24, 7)]
            turns = range(-2, options.rounds)
            if method == "suffix":  # after answers to others, each is asked once: its own answer would be known then
                for llm in (plain, drafted):
                    for _ in range(24):
                        play(llm, [[{"role": "user", "content": make(rng).question}]], 200, ends=True)
                turns = range(1)
            lines = [beside(plain, drafted, [prompt], 200, True, turns) for prompt in prompts]
            times = [[line["tokens"] / line["tokens_per_s"][arm] for line in lines] for arm in (0, 1)]
            after = [sum(line["after_first"][arm] for line in lines) for arm in (0, 1)]
            merged = {
                "ratio": sum(times[0]) / sum(times[1]),
                "ratio_after_first": after[0] / after[1],
                "steps": [sum(line["steps"][arm] for line in lines) for arm in (0, 1)],
                "drafts": sum(line["drafts"] for line in lines),
                "accepted": sum(line["accepted"] for line in lines),
            }
            found.append({"work": f"demo, {family}{name}", "rows": 1, **merged})
    return found


def least_times(options: argparse.Namespace, method: str) -> dict[int, float]:
    """Least time of a step of one row of the demo model, by its number of drafts, us."""
    least, now = dict[int, float](), 0

    def learn(gate: DraftGate, kind: StepKind, places: int, prompt: int, ns: int, held: float = 0.0) -> None:
        if kind == kind_of(1):
            least[places - 1] = min(least.get(places - 1, ns / 1e3), ns / 1e3)

    def decide(gate: DraftGate, decode: tuple[int, ...]) -> Verify:
        return Verify(1 + now, drafts=now > 0) if decode else WITHOUT_DRAFTS

    patches = {"learn": learn, "decide": decide, "decide_beside": lambda *_: WITHOUT_DRAFTS}
    with (
        unittest.mock.patch.multiple(DraftGate, **patches),
        drafting(options, model_of("demo", Path()), None, method, 8) as llm,
    ):
        for drafts in (0, 2, 4, 8) * 3:
            now = drafts
            play(llm, [{"prompt_token_ids": PROMPT}], options.output, ends=False)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    works = ("oracle", "numbers", "ngram", "suffix", "eagle3", "draft_model", "prompt", "noise", "steps")
    parser.add_argument("--works", nargs="+", choices=works, default=works[:5])
    parser.add_argument(
        "--models", nargs="+", choices=("demo", "small"), default=["small"], help="those of `prompt`, `noise`"
    )
    parser.add_argument("--warm", type=int, default=512, help="tokens of a prompt of `prompt`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"host": environment.describe_host(), "device": options.device, "works": []}
    with tempfile.TemporaryDirectory() as folder:
        for name, right in (("demo", 0.8), ("demo", 0.0), ("small", 0.8)) if "oracle" in options.works else ():
            found["works"] += with_oracle(options, name, right, Path(folder))
        for right in (0.95, 0.6, 0.3) if "numbers" in options.works else ():
            found["works"] += with_numbers(options, right)
        found["works"] += on_copies(options, Path(folder)) if "prompt" in options.works else []
        found["works"] += on_noise(options, Path(folder)) if "noise" in options.works else []
    for method in ("ngram", "suffix", "eagle3", "draft_model"):
        found["works"] += on_tasks(options, method) if method in options.works else []
    for method in ("ngram", "eagle3") if "steps" in options.works else ():
        found[f"steps, {method}"] = least = least_times(options, method)
        print(f"{method}:", ", ".join(f"{drafts} drafts {us:,.0f} us" for drafts, us in sorted(least.items())))
    print("| work | rows | ratio of tokens/s | after the first token | steps, without : with | drafts | right |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for work in found["works"]:
        after_first = f"{work['ratio_after_first']:.2f}" if "ratio_after_first" in work else ""
        print(
            f"| {work['work']} | {work['rows']} | {work['ratio']:.2f} | {after_first} "
            f"| {work['steps'][0]} : {work['steps'][1]} "
            f"| {work['drafts']} | {work['accepted'] / max(1, work['drafts']):.0%} |"
        )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
