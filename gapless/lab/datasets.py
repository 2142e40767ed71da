"""Prompts that are made up: drawn from one seed, with exact lengths in tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from gapless.base.errors import ConfigError
from gapless.lab.target import Content


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


class Source(Protocol):
    """Makes content of a given number of tokens."""

    def draw(self, rng: random.Random, tokens: int) -> tuple[int, ...] | tuple[str, ...]:
        """Random units that make up `tokens` tokens; parts may be concatenated."""
        ...

    def content(self, units: Sequence[int] | Sequence[str]) -> Content: ...


class IdSource:
    """Token ids, which every server with the vLLM extensions takes: the lengths are exact whatever the tokenizer."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def draw(self, rng: random.Random, tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(self._ids, k=tokens))

    def content(self, units: Sequence[int] | Sequence[str]) -> Content:
        return tuple(int(unit) for unit in units)


class WordSource:
    """Words with spaces between. `tokens_per_word` is what the server's tokenizer makes of them on average."""

    def __init__(self, words: Sequence[str], tokens_per_word: float = 1.0) -> None:
        self._words = words
        self._scale = tokens_per_word

    def draw(self, rng: random.Random, tokens: int) -> tuple[str, ...]:
        return tuple(rng.choices(self._words, k=max(1, round(tokens / self._scale)) if tokens else 0))

    def content(self, units: Sequence[int] | Sequence[str]) -> Content:
        return " ".join(str(unit) for unit in units)


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


class LogUniform(NamedTuple):
    """Whole numbers from `low` to `high`, both included: between 10 and 100 as many as between 100 and 1,000."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


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


def prefix_prompts(
    source: Source,
    count: int,
    *,
    prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    zipf: float = 0.0,
    seed: int = 0,
) -> list[Prompt]:
    """Each prompt is one of `prefixes` shared beginnings and an end of its own, in shuffled order.

    With `zipf` 0 every prefix is used equally often (to within one); otherwise the k-th is drawn with a weight of
    1 / k^zipf, as a few popular system prompts and many rare ones would be.
    """
    if prefixes < 1:
        raise ConfigError(f"there must be at least one prefix, got {prefixes}")
    rng = _rng(seed, "prefixes")
    begun = [source.draw(rng, prefix_len) for _ in range(prefixes)]
    if zipf:
        chosen = zipf_draws(rng, prefixes, zipf, count)
    else:
        chosen = [place % prefixes for place in range(count)]
        rng.shuffle(chosen)
    return [
        Prompt(
            place,
            source.content((*begun[group], *source.draw(rng, suffix_len))),
            prefix_len + suffix_len,
            output_len,
        )
        for place, group in enumerate(chosen)
    ]


def zipf_draws(rng: random.Random, groups: int, exponent: float, count: int) -> list[int]:
    """Group numbers from 0, the k-th group with a probability proportional to 1 / (k + 1)^exponent."""
    weights = list(accumulate(1 / (k + 1) ** exponent for k in range(groups)))
    return rng.choices(range(groups), cum_weights=weights, k=count)


def multi_turn_prompts(
    source: WordSource, count: int, turns: int, inputs: Lengths, outputs: Lengths, *, pause: float = 0.0, seed: int = 0
) -> list[Prompt]:
    """Conversations of `turns` questions each; a turn waits for the answer before and is sent with all of it.

    `input_len` is known for first turns only: what the answers add is up to the model.
    """
    if turns < 1:
        raise ConfigError(f"a conversation has at least one turn, got {turns}")
    rng = _rng(seed, "turns")
    made = []
    for place in range(count):
        first = place % turns == 0
        length, output = inputs.draw(rng), outputs.draw(rng)
        content = source.content(source.draw(rng, length))
        follows, wait = (-1, 0.0) if first else (place - 1, pause)
        made.append(Prompt(place, content, length if first else 0, output, None, follows, wait))
    return made
