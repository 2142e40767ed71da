"""What a row of peers.py sends: its kind, its prompts, and when they leave.

plain   Prompts and answers of one length, a closed loop.
mixed   Prompts from 10 tokens to the longest that the model's context holds beside an answer, answers from 16 to 256,
        both log-uniform; a closed loop.
open    The prompts of mixed as an open loop: Poisson arrivals, as many under way as there are. Every side gets the same
        prompts at the same times, at 0.7 of the requests a second that the slowest side of the row, ours included,
        reached in a closed loop just before. So no side gets more than it can serve, and its latencies do not measure
        the length of its queue. A faster side has more room: the row says what users wait under one load, not what
        each side does at 0.7 of its own capacity.
shared  512 tokens that all prompts of a round begin with, and an end of its own for each; a closed loop. Each round has
        another beginning, and servers are started with their prefix caches on ({prefix_caching} in their commands).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from peer_servers import Spec

from gapless.lab.arrivals import Arrivals
from gapless.lab.datasets import Lengths, Prompt, Source, Workload, prefix_prompts, random_prompts


class LogUniform(NamedTuple):
    """Whole numbers from `low` to `high`, both included: between 10 and 100 as many as between 100 and 1,000."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


PLAIN, MIXED, OPEN, SHARED = KINDS = ("plain", "mixed", "open", "shared")
SHORTEST_PROMPT = 10
MIXED_ANSWERS = LogUniform(16, 256)
SHARED_TOKENS = 512
OPEN_SHARE = 0.7
CASES = (
    *("tiny:1:32:5", "tiny:8:128:5", "tiny:32:256:5", "small:1:3:5", "small:8:16:5", "small:32:32:5"),
    *("tiny:8:128:5:mixed", "tiny:32:256:5:mixed", "small:8:16:5:mixed", "small:32:32:5:mixed"),
    *("tiny:32:256:5:open", "small:8:32:5:open", "tiny:8:128:5:shared", "small:8:16:5:shared"),
)
"""Requests so that a run lasts 4 s and more; the rounds of the large ones fit into half an hour."""


@dataclass(frozen=True)
class Case:
    """One row. `concurrency` is that of its closed loop; of an open row, of the loop that measures the capacity."""

    model: str
    concurrency: int
    requests: int
    rounds: int
    kind: str = PLAIN

    @property
    def key(self) -> str:
        return f"{self.model}:{self.concurrency}"

    @property
    def server(self) -> str:
        """What must be started for it; rows with one of these share their servers."""
        return f"{self.model}, prefix cache on" if self.kind == SHARED else self.model

    @property
    def prefix_caching(self) -> str:
        return "--enable-prefix-caching" if self.kind == SHARED else "--no-enable-prefix-caching"


def parse_case(text: str) -> Case:
    """`MODEL:CONCURRENCY:REQUESTS:ROUNDS[:KIND]`. Raises ValueError."""
    model, *numbers = text.split(":")
    kind = numbers.pop() if len(numbers) == 4 else PLAIN
    if len(numbers) != 3 or not model:
        raise ValueError(f"write MODEL:CONCURRENCY:REQUESTS:ROUNDS or ...:ROUNDS:KIND, not {text!r}")
    if kind not in KINDS:
        raise ValueError(f"the kind of a case is one of {', '.join(KINDS)}: {text!r}")
    concurrency, requests, rounds = (int(number) for number in numbers)
    if min(concurrency, requests, rounds) < 1:
        raise ValueError(f"numbers of a case are at least 1: {text!r}")
    return Case(model, concurrency, requests, rounds, kind)


def takes_part(spec: Spec, case: Case) -> bool:
    """`only` is empty, or a list of MODEL and MODEL:CONCURRENCY."""
    return not spec.only or bool({case.model, case.key} & set(spec.only.split(",")))


class Sizes(NamedTuple):
    """Lengths in tokens, and the ids that prompts are made of."""

    inputs: int
    outputs: int
    most: int
    """The longest prompt of a mixed row."""
    vocabulary: int

    def prompts(self, kind: str, count: int, seed: int) -> list[Prompt]:
        source = Source(range(self.vocabulary))
        if kind == SHARED:
            lengths = {"prefix_len": SHARED_TOKENS, "input_len": self.inputs, "output_len": self.outputs}
            return prefix_prompts(source, Workload("shared_prefix", count, seed, prefixes=1, zipf=0.0, **lengths))
        if kind == PLAIN:
            return random_prompts(source, count, Lengths(self.inputs), Lengths(self.outputs), seed=seed)
        return random_prompts(source, count, LogUniform(SHORTEST_PROMPT, self.most), MIXED_ANSWERS, seed=seed)


def longest_prompt(model: Path, max_model_len: int) -> int:
    """Tokens that leave room for the longest answer of a mixed row. Raises ValueError where a model has no room."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    context = min(max_model_len, config.get("max_position_embeddings", max_model_len))
    most = int(context) - MIXED_ANSWERS.high
    if most < SHORTEST_PROMPT:
        raise ValueError(f"{model}: a context of {context} tokens is too short for mixed rows: leave them out (--rows)")
    return most


def departures(count: int, rate: float, seed: int) -> tuple[float, ...]:
    """Seconds from the start at which requests leave: Poisson at `rate` a second; 0 is a closed loop, all at once."""
    return Arrivals(rate).times(count, seed) if rate else (0.0,) * count


def open_rate(capacities: Mapping[str, float]) -> float:
    """Requests a second of an open row, from what each side reached in a closed loop; 0 where none was measured."""
    return OPEN_SHARE * min(capacities.values(), default=0.0)
