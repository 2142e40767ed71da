"""Workloads, and the prompts of those that are made up: drawn from one seed, with exact lengths in tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from gapless.base.errors import ConfigError
from gapless.lab.target import Content

MADE_UP = ("random", "shared_prefix", "multi_turn")
FROM_FILES = ("custom", "sharegpt", "timed_trace")
DATASETS = (*MADE_UP, *FROM_FILES)


class Prompt(NamedTuple):
    """One request to send."""

    place: int
    """Number of the prompt in the data set, from 0."""
    content: Content
    input_len: int
    """Tokens that the content should have; 0 if unknown."""
    output_len: int
    at: float | None = None
    """When it is to leave, in seconds from the start; None leaves that to the arrival process."""
    follows: int = -1
    """Place of the turn before, whose question and answer stand in front of this content; -1 for a first turn."""
    pause: float = 0.0
    """Seconds between the end of that turn and this one."""


class Source:
    """Draws random units, token ids or words, that make up a number of tokens; parts may be concatenated."""

    def __init__(self, units: Sequence[Any], tokens_per_unit: float = 1.0) -> None:
        self._units = units
        self._scale = tokens_per_unit

    def draw(self, rng: random.Random, tokens: int) -> tuple[Any, ...]:
        return tuple(rng.choices(self._units, k=max(1, round(tokens / self._scale)) if tokens else 0))

    def content(self, units: Sequence[Any]) -> Content:
        raise NotImplementedError


class IdSource(Source):
    """Token ids, which every server with the vLLM extensions takes: the lengths are exact whatever the tokenizer."""

    def content(self, units: Sequence[int]) -> Content:
        return tuple(units)


class WordSource(Source):
    """Words with spaces between. `tokens_per_unit` is what the server's tokenizer makes of one on average."""

    def content(self, units: Sequence[str]) -> Content:
        return " ".join(units)


class Drawn(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, rng: random.Random) -> int: ...


class Lengths(NamedTuple):
    """Uniform in [mean x (1 - ratio), mean x (1 + ratio)], whole numbers, at least 1."""

    mean: int
    ratio: float = 0.0

    def draw(self, rng: random.Random) -> int:
        low = max(1, math.floor(self.mean * (1 - self.ratio)))
        return rng.randint(low, max(low, math.ceil(self.mean * (1 + self.ratio))))


@dataclass(frozen=True)
class Workload:
    """Lengths are in tokens. A seed fixes everything."""

    dataset: str = "random"
    num_prompts: int = 128
    """0: each line of a file once."""
    seed: int = 0
    path: str = ""
    input_len: int = 1024
    output_len: int = 128
    """0: as the file says."""
    range_ratio: float = 0.0
    prefix_len: int = 0
    """Tokens that prompts begin with in common, on top of the input length."""
    prefixes: int = 10
    """How many beginnings shared_prefix has."""
    zipf: float = 1.0
    """The k-th of them is used with weight 1 / k^zipf."""
    turns: int = 4
    pause: float = 0.0
    """Seconds between an answer and the next turn."""
    block: int = 512
    """Tokens that one hash id of a trace stands for."""
    seconds_per_tick: float = 0.001
    self_timed: bool = True
    """A trace is replayed at its own times."""
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert self.dataset in DATASETS
        if self.dataset in FROM_FILES and not self.path:
            raise ConfigError(f"the data set {self.dataset} needs a file: --dataset-path FILE")
        if self.dataset in MADE_UP and self.path:
            raise ConfigError(f"the data set {self.dataset} is made up; a file goes with {', '.join(FROM_FILES)}")
        if self.dataset in MADE_UP and self.num_prompts < 1:
            raise ConfigError(f"num-prompts must be at least 1, got {self.num_prompts}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range-ratio must be from 0 to below 1, got {self.range_ratio}")

    @property
    def own_times(self) -> bool:
        """The data set itself says when requests are sent."""
        return self.dataset == "timed_trace" and self.self_timed

    @property
    def inputs(self) -> Lengths:
        return Lengths(self.input_len, self.range_ratio)

    @property
    def outputs(self) -> Lengths:
        return Lengths(self.output_len, self.range_ratio)


def _rng(seed: int, what: str) -> random.Random:
    return random.Random(f"{what} {seed}")


def random_prompts(
    source: Source, count: int, inputs: Drawn, outputs: Drawn, *, prefix_len: int = 0, seed: int = 0
) -> list[Prompt]:
    """Prompts with nothing in common but a prefix of `prefix_len` tokens, which comes on top of the input length."""
    rng = _rng(seed, "random")
    prefix = source.draw(rng, prefix_len)
    made = []
    for place in range(count):
        length, output = inputs.draw(rng), outputs.draw(rng)
        units = (*prefix, *source.draw(rng, length))
        made.append(Prompt(place, source.content(units), prefix_len + length, output))
    return made


def prefix_prompts(source: Source, work: Workload) -> list[Prompt]:
    """Each prompt is one of `prefixes` shared beginnings and an end of its own, in shuffled order.

    With `zipf` 0 every prefix is used equally often (to within one); otherwise the k-th is drawn with a weight of
    1 / k^zipf, as a few popular system prompts and many rare ones would be.
    """
    rng = _rng(work.seed, "prefixes")
    begun = [source.draw(rng, work.prefix_len) for _ in range(work.prefixes)]
    if work.zipf:
        chosen = zipf_draws(rng, work.prefixes, work.zipf, work.num_prompts)
    else:
        chosen = [place % work.prefixes for place in range(work.num_prompts)]
        rng.shuffle(chosen)
    length = work.prefix_len + work.input_len
    contents = [source.content((*begun[group], *source.draw(rng, work.input_len))) for group in chosen]
    return [Prompt(place, content, length, work.output_len) for place, content in enumerate(contents)]


def zipf_draws(rng: random.Random, groups: int, exponent: float, count: int) -> list[int]:
    """Group numbers from 0, the k-th group with a probability proportional to 1 / (k + 1)^exponent."""
    weights = list(accumulate(1 / (k + 1) ** exponent for k in range(groups)))
    return rng.choices(range(groups), cum_weights=weights, k=count)


def multi_turn_prompts(source: WordSource, work: Workload) -> list[Prompt]:
    """Conversations of `turns` questions each; a turn waits for the answer before and is sent with all of it.

    `input_len` is known for first turns only: what the answers add is up to the model.
    """
    rng = _rng(work.seed, "turns")
    made = []
    for place in range(work.num_prompts):
        first = place % work.turns == 0
        length, output = work.inputs.draw(rng), work.outputs.draw(rng)
        content = source.content(source.draw(rng, length))
        follows, wait = (-1, 0.0) if first else (place - 1, work.pause)
        made.append(Prompt(place, content, length if first else 0, output, None, follows, wait))
    return made
