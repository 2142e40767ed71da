"""Runs of a small model with random weights, whose tokens and log-probabilities are compared to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tiny_models import tiny_config

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core

TINY = tiny_config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    head_dim=32,
    max_position_embeddings=1024,
    eos_token_id=1,
)


class Job(NamedTuple):
    key: int
    prompt: list[int]
    output: int
    temperature: float

    def request(self, scored: bool) -> Request:
        # Nothing stops early: every job has `output` tokens.
        params = SamplingParams(temperature=self.temperature, logprobs=1 if scored else None)
        length = len(self.prompt)
        prompt = np.array(self.prompt, np.int32)
        return Request(self.key, prompt, params, 7919 * self.key + 1, (), 0, length + self.output)


class Outcome(NamedTuple):
    """What a run gave, by request; log-probabilities as float32."""

    tokens: dict[int, list[int]]
    logprobs: dict[int, dict[int, float]]
    preemptions: int
    cached: int
    scored: bool
    """Whether log-probabilities were asked for."""


def jobs(count: int, vocab: int, longest: int, output: int, shared: int) -> list[Job]:
    """Prompts of mixed lengths, half of them after one common beginning of `shared` tokens; greedy and random."""
    random = np.random.default_rng(0)
    common = random.integers(2, vocab, shared).tolist()
    made = []
    for key in range(count):
        own = random.integers(2, vocab, int(random.integers(1, longest))).tolist()
        prompt = common + own if key % 2 else own
        made.append(Job(key, prompt, int(random.integers(output // 2, output)), float(key % 3 > 0)))
    return made


def engine(directory: Path, device: str, model: dict[str, Any], **options: Any) -> EngineCore:
    (directory / "config.json").write_text(json.dumps(model))
    return build_core(EngineConfig(model=str(directory), load_format="dummy", device=device, **options))


def play(core: EngineCore, work: list[Job], at_once: int = 0, scored: bool = True) -> Outcome:
    """Run all jobs, `at_once` of them submitted at a time (0: all), and close nothing."""
    tokens: dict[int, list[int]] = {job.key: [] for job in work}
    logprobs: dict[int, dict[int, float]] = {job.key: {} for job in work}
    waiting, cached, before = list(work), 0, core.stats().queue.preemptions
    while waiting or core.has_work():
        if waiting and (not core.has_work() or not at_once):
            now, waiting = (waiting[:at_once], waiting[at_once:]) if at_once else (waiting, [])
            for job in now:
                core.submit(job.request(scored))
        started, settled, _ = core.step()
        cached += sum(count for _, count in started)
        for step in settled:
            for key, token, _ in step.entries():
                tokens[key].append(token)
            if step.logprobs is not None:
                for key, position, logprob, *_ in zip(*(column.tolist() for column in step.logprobs), strict=True):
                    logprobs[key][position] = logprob
    return Outcome(tokens, logprobs, core.stats().queue.preemptions - before, cached, scored)


def differing(got: Outcome, want: Outcome) -> list[int]:
    """Requests whose tokens, or log-probabilities to the bit, are not those of `want`."""
    tokens = {key for key in want.tokens if got.tokens[key] != want.tokens[key]}
    bits = {key for key in want.logprobs if got.scored and got.logprobs[key] != want.logprobs[key]}
    return sorted(tokens | bits)
