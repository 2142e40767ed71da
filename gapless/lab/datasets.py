"""Workloads and their prompts: made up from one seed with exact lengths in tokens, or from files.

Files are JSON lines of prompts, ShareGPT conversations, and traces of arrivals.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gapless.base.errors import ConfigError
from gapless.lab.probe import Codec
from gapless.lab.target import PromptContent

MADE_UP = ("random", "shared_prefix", "multi_turn")
FROM_FILES = ("custom", "sharegpt", "timed_trace")
DATASETS = (*MADE_UP, *FROM_FILES)
OUTPUT_KEYS = ("output_tokens", "output_len", "output_length", "max_tokens")
CHARS_PER_TOKEN = 4


class Prompt(NamedTuple):
    """One request to send."""

    place: int
    """Number of the prompt in the data set, from 0."""
    content: PromptContent
    input_len: int
    """Tokens that the content should have; 0 if unknown."""
    output_len: int
    at: float | None = None
    """When it is to leave, in seconds from the start; None leaves that to the arrival process."""
    follows: int = -1
    """Place of the turn before, whose question and answer stand in front of this content; -1 for a first turn."""
    pause: float = 0.0
    """Seconds between the end of that turn and this one."""


class Source(NamedTuple):
    """Draws random units, token ids or words, that make up a number of tokens; parts may be concatenated."""

    units: Sequence[Any]
    """Ids, which every server with the vLLM extensions takes, give exact lengths whatever the tokenizer. Words have
    spaces between."""
    tokens_per_unit: float = 1.0
    """Tokens of a word on average, by the server's tokenizer."""
    note: str = ""
    """The basis of the lengths, if it is not obvious."""
    codec: Codec | None = None
    """Set when texts have to be cut to their length."""

    def draw(self, rng: random.Random, tokens: int) -> tuple[Any, ...]:
        return tuple(rng.choices(self.units, k=max(1, round(tokens / self.tokens_per_unit)) if tokens else 0))

    def content(self, units: Sequence[Any]) -> PromptContent:
        return " ".join(units) if isinstance(self.units[0], str) else tuple(units)


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
    """0: by the file."""
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
        """The data set itself has the times of requests."""
        return self.dataset == "timed_trace" and self.self_timed

    @property
    def inputs(self) -> Lengths:
        return Lengths(self.input_len, self.range_ratio)

    @property
    def outputs(self) -> Lengths:
        return Lengths(self.output_len, self.range_ratio)


def build(work: Workload, source: Source) -> list[Prompt]:
    """The prompts of a workload. Raises ConfigError for a file that is wrong."""
    if work.dataset == "custom":
        return custom_prompts(work)
    if work.dataset == "sharegpt":
        return sharegpt_prompts(work)
    if work.dataset == "timed_trace":
        return trace_prompts(source, work)
    if work.dataset == "multi_turn":
        return multi_turn_prompts(source, work)
    if work.dataset == "shared_prefix":
        return prefix_prompts(source, work)
    return random_prompts(
        source, work.num_prompts, work.inputs, work.outputs, prefix_len=work.prefix_len, seed=work.seed
    )


def random_prompts(
    source: Source, count: int, inputs: Drawn, outputs: Drawn, *, prefix_len: int = 0, seed: int = 0
) -> list[Prompt]:
    """Prompts with nothing in common but a prefix of `prefix_len` tokens, which comes on top of the input length."""
    rng = random.Random(f"random {seed}")
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
    rng = random.Random(f"prefixes {work.seed}")
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


def multi_turn_prompts(source: Source, work: Workload) -> list[Prompt]:
    """Conversations of `turns` questions each; a turn waits for the answer before and is sent with all of it.

    `input_len` is known for first turns only: what the answers add is up to the model.
    """
    rng = random.Random(f"turns {work.seed}")
    made = []
    for place in range(work.num_prompts):
        first = place % work.turns == 0
        length, output = work.inputs.draw(rng), work.outputs.draw(rng)
        content = source.content(source.draw(rng, length))
        follows, wait = (-1, 0.0) if first else (place - 1, work.pause)
        made.append(Prompt(place, content, length if first else 0, output, None, follows, wait))
    return made


def take(items: Sequence[Prompt], work: Workload) -> list[Prompt]:
    """Take as many prompts as the workload asks for (0: each once), from the front again if there are too few."""
    chosen = list(items)
    if work.shuffle:
        random.Random(f"shuffle {work.seed}").shuffle(chosen)
    number = work.num_prompts or len(chosen)
    return [chosen[place % len(chosen)]._replace(place=place) for place in range(number)]


def custom_prompts(work: Workload) -> list[Prompt]:
    """Lines like {"prompt": "...", "output_tokens": 32}; the prompt is text or token ids, or there are "messages".

    The workload's output length is for lines that name none.
    """
    lines = json_objects(work.path, "dataset-path")
    return take([_custom(value, where, work.output_len) for where, value in lines], work)


def _custom(value: Mapping[str, Any], where: str, output_len: int) -> Prompt:
    said = next((value[key] for key in OUTPUT_KEYS if key in value), output_len)
    length = _whole(said, where, "output_tokens", 1)
    content = _content(value, where)
    return Prompt(0, content, len(content) if isinstance(content, tuple) and "prompt" in value else 0, length)


def _content(value: Mapping[str, Any], where: str) -> PromptContent:
    if ("prompt" in value) == ("messages" in value):
        raise ConfigError(f'{where}: expected {{"prompt": ...}} or {{"messages": [...]}}')
    if "messages" in value:
        messages = value["messages"]
        if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
            raise ConfigError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}')
        return tuple(messages)
    prompt = value["prompt"]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(t) is int and t >= 0 for t in prompt):
        return tuple(prompt)
    raise ConfigError(f"{where}: prompt must be text or a list of token ids")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def sharegpt_prompts(work: Workload) -> list[Prompt]:
    """First questions of ShareGPT conversations: a JSON list, or JSON lines, of {"conversations": [{"value": ...}]}.

    With an output length of 0 an answer is as long as the one in the file, taken at four characters a token.
    """
    found = []
    for where, value in _sharegpt_entries(work.path):
        turns = value.get("conversations") or value.get("conversation") or ()
        if not isinstance(turns, (list, tuple)):
            raise ConfigError(f"{where}: conversations must be a list")
        if len(turns) < 2:
            continue
        question, answer = (_turn_text(turn, where) for turn in turns[:2])
        if question:
            length = work.output_len or max(1, len(answer) // CHARS_PER_TOKEN)
            found.append(Prompt(0, question, 0, length))
    if not found:
        raise ConfigError(f"{work.path}: no conversation of two turns or more")
    return take(found, work)


def _sharegpt_entries(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = _read(path, "dataset-path")
    if not text.lstrip().startswith("["):
        yield from json_objects(path, "dataset-path")
        return
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: entry {index} must be an object")
        yield f"{path}: entry {index}", value


def _turn_text(turn: Any, where: str) -> str:
    text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: a turn must look like {{"from": "human", "value": ...}}')
    return text


def trace_prompts(source: Source, work: Workload) -> list[Prompt]:
    """A trace in Mooncake's form: {"timestamp", "input_length", "output_length", "hash_ids"} a line.

    `timestamp` times `seconds_per_tick` are seconds; the first arrival is the start. Each hash id stands for the same
    `block` tokens wherever it comes up, so that prompts share prefixes as they did. At most `num_prompts` lines, in
    order of time.
    """
    timed = work.self_timed
    arrivals = [
        (_number(value, "timestamp", where) * work.seconds_per_tick if timed else 0.0, where, value)
        for where, value in json_objects(work.path, "dataset-path")
    ]
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])[: work.num_prompts or None]
    start = arrivals[0][0]
    made = []
    for place, (at, where, value) in enumerate(arrivals):
        length = _whole(value.get("input_length"), where, "input_length", 1)
        output = _whole(value.get("output_length", 1), where, "output_length", 1)
        units = _trace_units(source, _hashes(value, where), length, work, place)
        made.append(Prompt(place, source.content(units), length, output, at - start if timed else None))
    return made


def _hashes(value: Mapping[str, Any], where: str) -> Sequence[int]:
    hashes = value.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(type(number) is int for number in hashes):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers")
    return hashes


def _trace_units(source: Source, hashes: Sequence[int], length: int, work: Workload, place: int) -> list[Any]:
    units: list[Any] = []
    left = length
    for number in hashes:
        units += source.draw(random.Random(f"block {work.seed} {number}"), min(work.block, left))
        left -= min(work.block, left)
    return units + list(source.draw(random.Random(f"tail {work.seed} {place}"), left))


def _number(value: Mapping[str, Any], key: str, where: str) -> float:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
        raise ConfigError(f"{where}: {key} must be a number of at least 0, got {number!r}")
    return float(number)


def _whole(value: object, where: str, key: str, low: int) -> int:
    if type(value) is not int or value < low:
        raise ConfigError(f"{where}: {key} must be a whole number of at least {low}, got {value!r}")
    return value


def json_objects(path: str | Path, what: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSON lines file, `what` it is, each with `file:line`. Raises ConfigError naming them."""
    found = []
    # str.splitlines() would also cut at U+2028 and others, which JSON text may hold.
    for number, line in enumerate(_read(path, what).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected an object, got {type(value).__name__}")
        found.append((where, value))
    if not found:
        raise ConfigError(f"{path} holds no line")
    return found


def _read(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} is not UTF-8 text: {error}") from error
