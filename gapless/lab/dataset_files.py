"""Data sets that are files: JSON lines of prompts, ShareGPT conversations, and traces of arrivals."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.lab.datasets import Prompt, Source
from gapless.lab.target import Content

OUTPUT_KEYS = ("output_tokens", "output_len", "output_length", "max_tokens")
CHARS_PER_TOKEN = 4


class Sampling(NamedTuple):
    """How prompts are taken from a file: shuffled by seed, and again from the front when there are too few.

    Number 0 takes each of them once.
    """

    number: int
    seed: int = 0
    shuffle: bool = True


def take(items: Sequence[Prompt], how: Sampling) -> list[Prompt]:
    chosen = list(items)
    if how.shuffle:
        random.Random(f"shuffle {how.seed}").shuffle(chosen)
    return [chosen[i % len(chosen)] for i in range(how.number or len(chosen))]


def custom_prompts(path: Path, output_len: int, how: Sampling) -> list[Prompt]:
    """Lines like {"prompt": "...", "output_tokens": 32}; the prompt is text or token ids, or there are "messages".

    `output_len` is for lines that do not say.
    """
    found = [_custom(value, f"{path}:{number}", output_len) for number, value in _json_lines(path)]
    return [prompt._replace(place=place) for place, prompt in enumerate(take(found, how))]


def _custom(value: Mapping[str, Any], where: str, output_len: int) -> Prompt:
    said = next((value[key] for key in OUTPUT_KEYS if key in value), output_len)
    length = _whole(said, where, "output_tokens", 1)
    content = _content(value, where)
    return Prompt(0, content, len(content) if isinstance(content, tuple) and "prompt" in value else 0, length)


def _content(value: Mapping[str, Any], where: str) -> Content:
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


def sharegpt_prompts(path: Path, output_len: int, how: Sampling) -> list[Prompt]:
    """First questions of ShareGPT conversations: a JSON list, or JSON lines, of {"conversations": [{"value": ...}]}.

    With an `output_len` of 0 an answer is as long as the one in the file, taken at four characters a token.
    """
    found = []
    for where, value in _sharegpt_entries(path):
        turns = value.get("conversations") or value.get("conversation") or ()
        if not isinstance(turns, (list, tuple)):
            raise ConfigError(f"{where}: conversations must be a list")
        if len(turns) < 2:
            continue
        question, answer = (_turn_text(turn, where) for turn in turns[:2])
        if question:
            length = output_len or max(1, len(answer) // CHARS_PER_TOKEN)
            found.append(Prompt(0, question, 0, length))
    if not found:
        raise ConfigError(f"{path}: no conversation of two turns or more")
    return [prompt._replace(place=place) for place, prompt in enumerate(take(found, how))]


def _sharegpt_entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = _read(path)
    if not text.lstrip().startswith("["):
        yield from ((f"{path}:{number}", value) for number, value in _json_lines(path))
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


def trace_prompts(
    path: Path, source: Source, count: int, *, block: int = 512, scale: float = 0.001, timed: bool = True, seed: int = 0
) -> list[Prompt]:
    """A trace in Mooncake's form: {"timestamp", "input_length", "output_length", "hash_ids"} a line.

    `timestamp` times `scale` are seconds; the first arrival is the start. Each hash id stands for the same `block`
    tokens wherever it comes up, so that prompts share prefixes as they did. At most `count` lines, in order of time.
    """
    lines = [(f"{path}:{number}", value) for number, value in _json_lines(path)]
    arrivals = [(_number(value, "timestamp", where) * scale if timed else 0.0, where, value) for where, value in lines]
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])[: count or None]
    start = arrivals[0][0]
    made = []
    for place, (at, where, value) in enumerate(arrivals):
        length = _whole(value.get("input_length"), where, "input_length", 1)
        output = _whole(value.get("output_length", 1), where, "output_length", 1)
        units = _trace_units(source, _hashes(value, where), length, block, seed, place)
        made.append(Prompt(place, source.content(units), length, output, at - start if timed else None))
    return made


def _hashes(value: Mapping[str, Any], where: str) -> Sequence[int]:
    hashes = value.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(type(number) is int for number in hashes):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers")
    return hashes


def _trace_units(source: Source, hashes: Sequence[int], length: int, block: int, seed: int, place: int) -> list[Any]:
    units: list[Any] = []
    left = length
    for number in hashes:
        units += source.draw(random.Random(f"block {seed} {number}"), min(block, left))
        left -= min(block, left)
    return units + list(source.draw(random.Random(f"tail {seed} {place}"), left))


def _number(value: Mapping[str, Any], key: str, where: str) -> float:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
        raise ConfigError(f"{where}: {key} must be a number of at least 0, got {number!r}")
    return float(number)


def _whole(value: object, where: str, key: str, low: int) -> int:
    if type(value) is not int or value < low:
        raise ConfigError(f"{where}: {key} must be a whole number of at least {low}, got {value!r}")
    return value


def json_lines(text: str) -> list[str]:
    """Lines of a JSON lines file; str.splitlines() would also cut at U+2028 and its like, which JSON text may hold."""
    return text.split("\n")


def _json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object). Raises ConfigError naming file and line."""
    found = []
    for number, line in enumerate(json_lines(_read(path)), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path}:{number}: expected an object, got {type(value).__name__}")
        found.append((number, value))
    if not found:
        raise ConfigError(f"{path} holds no line")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read dataset-path {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"dataset-path {path} is not UTF-8 text: {error}") from error
