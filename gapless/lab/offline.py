"""Measuring an engine in this process: full load, and one batch at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.base.params import SamplingParams
from gapless.engine.progress import Advance
from gapless.lab.datasets import Prompt, Source
from gapless.lab.stats import Spread

if TYPE_CHECKING:
    from gapless.engine.llm import LLM

PERCENTS = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


Report = tuple[list[str], dict[str, Any]]
"""The measurement: the lines that the command of this name of `vllm bench` prints, and the keys of its file."""


def throughput(llm: LLM, prompts: Sequence[Prompt], *, temperature: float = 0.0, bar: bool = False) -> Report:
    """All prompts at once, every answer of its full length. Raises RequestError for one that does not fit."""
    params = [_params(p.output_len, temperature) for p in prompts]
    contents = [_content(p) for p in prompts]
    start = time.perf_counter()
    answers = llm.generate(contents, params, use_tqdm=bar)
    seconds = time.perf_counter() - start
    given = sum(len(answer.prompt_token_ids) for answer in answers)
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    requests, total, output = (count / seconds for count in (len(answers), given + made, made))
    lines = [
        f"Throughput: {requests:.2f} requests/s, {total:.2f} total tokens/s, {output:.2f} output tokens/s",
        f"Total num prompt tokens:  {given}",
        f"Total num output tokens:  {made}",
    ]
    result = {
        "elapsed_time": seconds,
        "num_requests": len(answers),
        "total_num_tokens": given + made,
        "requests_per_second": requests,
        "tokens_per_second": total,
        "output_tokens_per_second": output,
    }
    return lines, result


def _content(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt.content, str):
        return prompt.content
    ids = [unit for unit in prompt.content if isinstance(unit, int)]
    if len(ids) != len(prompt.content):
        raise ConfigError("messages are not measured offline: use prompts, or gapless bench serve")
    return ids


def _params(length: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True)


class OfflineBatch(NamedTuple):
    size: int = 8
    input_len: int = 32
    output_len: int = 128
    temperature: float = 0.0
    seed: int = 0


def latency(llm: LLM, batch: OfflineBatch, *, warmups: int, iterations: int, advance: Advance) -> Report:
    """Time one batch shape repeatedly. Every iteration has new prompts, so that no prefix cache shortens it."""
    source, rng = Source(range(llm.info.vocab_size)), random.Random(f"latency {batch.seed}")
    params = _params(batch.output_len, batch.temperature)
    spent = []
    for done in range(warmups + iterations):
        prompts = [list(source.draw(rng, batch.input_len)) for _ in range(batch.size)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        spent.append(time.perf_counter() - start)
        advance(done + 1)
    found = Spread(spent[warmups:], PERCENTS)
    lines = [
        f"Avg latency: {found.mean} seconds",
        f"Std latency: {found.std} seconds",
        *(f"{p:g}% percentile latency: {value} seconds" for p, value in found.percentiles),
    ]
    result = {
        "avg_latency": found.mean,
        "std_latency": found.std,
        "latencies": spent[warmups:],
        "percentiles": {f"{p:g}": value for p, value in found.percentiles},
    }
    return lines, result
