"""Measuring an engine in this process: full load, and one batch at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.base.params import SamplingParams
from gapless.lab.datasets import IdSource, Prompt
from gapless.lab.stats import Spread, spread

if TYPE_CHECKING:
    from gapless.engine.llm import LLM

PERCENTS = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


class Throughput(NamedTuple):
    seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def lines(self) -> list[str]:
        """The lines that `vllm bench throughput` prints."""
        rates = [count / self.seconds for count in (self.requests, self.total_tokens, self.output_tokens)]
        return [
            f"Throughput: {rates[0]:.2f} requests/s, {rates[1]:.2f} total tokens/s, {rates[2]:.2f} output tokens/s",
            f"Total num prompt tokens:  {self.prompt_tokens}",
            f"Total num output tokens:  {self.output_tokens}",
        ]

    def json(self) -> dict[str, Any]:
        return {
            "elapsed_time": self.seconds,
            "num_requests": self.requests,
            "total_num_tokens": self.total_tokens,
            "requests_per_second": self.requests / self.seconds,
            "tokens_per_second": self.total_tokens / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
        }


def throughput(llm: LLM, prompts: Sequence[Prompt], *, temperature: float = 0.0, bar: bool = False) -> Throughput:
    """All prompts at once, every answer of its full length. Raises RequestError for one that does not fit."""
    params = [_params(p.output_len, temperature) for p in prompts]
    contents = [_content(p) for p in prompts]
    start = time.perf_counter()
    answers = llm.generate(contents, params, use_tqdm=bar)
    seconds = time.perf_counter() - start
    produced = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return Throughput(seconds, len(answers), sum(len(a.prompt_token_ids) for a in answers), produced)


def _content(prompt: Prompt) -> str | list[int]:
    if isinstance(prompt.content, str):
        return prompt.content
    ids = [unit for unit in prompt.content if isinstance(unit, int)]
    if len(ids) != len(prompt.content):
        raise ConfigError("messages are not measured offline: use prompts, or gapless bench serve")
    return ids


def _params(length: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=True)


class Latency(NamedTuple):
    """Seconds for one batch, iteration by iteration."""

    seconds: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        return spread(self.seconds, PERCENTS)

    def lines(self) -> list[str]:
        """The lines that `vllm bench latency` prints."""
        found = self.spread
        return [
            f"Avg latency: {found.mean} seconds",
            f"Std latency: {found.std} seconds",
            *(f"{p:g}% percentile latency: {value} seconds" for p, value in found.percentiles),
        ]

    def json(self) -> dict[str, Any]:
        found = self.spread
        return {
            "avg_latency": found.mean,
            "std_latency": found.std,
            "latencies": list(self.seconds),
            "percentiles": {f"{p:g}": value for p, value in found.percentiles},
        }


class OfflineBatch(NamedTuple):
    size: int = 8
    input_len: int = 32
    output_len: int = 128
    temperature: float = 0.0
    seed: int = 0


def latency(
    llm: LLM, batch: OfflineBatch, vocab_size: int, *, warmups: int, iterations: int, advance: Callable[[int], None]
) -> Latency:
    """Time one batch shape repeatedly. Every iteration has new prompts, so that no prefix cache shortens it."""
    source, rng = IdSource(range(vocab_size)), random.Random(f"latency {batch.seed}")
    params = _params(batch.output_len, batch.temperature)
    spent = []
    for done in range(warmups + iterations):
        prompts = [list(source.draw(rng, batch.input_len)) for _ in range(batch.size)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        spent.append(time.perf_counter() - start)
        advance(done + 1)
    return Latency(tuple(spent[warmups:]))
