"""How much of a JSON output its form leaves no choice about: `python benchmarks/forced_tokens.py [TOKENIZER_DIR]`.

Walks outputs, in the tokens of their text, along the masks of their forms. Without a directory: the demo model's
tokenizer. Prints, as shares of the tokens,
- *certain*: the mask allows this token alone,
- *one text*: every allowed token begins the longest of them, so that the text is certain and its tokens are not,
and how many steps a token takes if the longest token of each such mask is a draft, DRAFTS at most in a step.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any, NamedTuple

import numpy as np

from gapless.base.structured import StructuredOutputs
from gapless.demo import weights_dir
from gapless.grammar.kept import Grammars
from gapless.grammar.vocabulary import make_vocabulary
from gapless.text.tokenizer import Tokenizer

OUTPUTS, DRAFTS, NARROW = 100, 4, 16
"""Outputs of each form; drafts of a step; tokens of a mask whose texts are compared, at most"""
WORDS = ["amber", "basket", "copper", "dolphin", "evening", "forest", "garden", "harbour", "island", "jungle"]
TYPES = {str: "string", int: "integer", bool: "boolean"}


class Place(NamedTuple):
    """One token of an output, by the mask that it was under."""

    allowed: int
    drafted: bool | None
    """Whether the longest allowed token is the token; None where the text is not certain"""


def person(rng: random.Random) -> dict[str, Any]:
    return {"name": rng.choice(WORDS).title(), "age": rng.randrange(99), "city": rng.choice(WORDS).title()}


def call(rng: random.Random) -> dict[str, Any]:
    return {"name": "create_calendar_event", "arguments": {"title": rng.choice(WORDS), "all_day": rng.random() < 0.5}}


def fields(rng: random.Random) -> dict[str, Any]:
    return {f"measurement_{word}_{number}": rng.randrange(9) for number in range(2) for word in WORDS}


def schema_of(value: Any) -> dict[str, Any]:
    """The schema of values with these keys and types; the name of a tool is fixed."""
    if isinstance(value, dict):
        parts = {key: schema_of(part) for key, part in value.items()}
        if "arguments" in value:
            parts["name"] = {"const": value["name"]}
        return {"type": "object", "properties": parts, "required": list(value), "additionalProperties": False}
    return {"type": TYPES[type(value)]}


class Walker:
    """Walks outputs along the masks of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        size = tokenizer.vocab_size
        self._eos = size - 1 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self._grammars = Grammars(make_vocabulary(tokenizer, size, (self._eos,)))
        self._words = np.zeros(-(-size // 32), np.int32)

    def walk(self, form: StructuredOutputs, text: str) -> list[Place]:
        matcher, places = self._grammars.matcher(form, (self._eos,)), []
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            matcher.write_mask(self._words)
            allowed = np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little")).tolist()
            assert token in allowed, f"{text!r} has not the form"
            longest = self._longest(allowed)
            places.append(Place(len(allowed), None if longest is None else longest == token))
            matcher.advance([token])
        return places

    def _longest(self, allowed: list[int]) -> int | None:
        """Return the token that all the others begin, if there is one."""
        if len(allowed) > NARROW:
            return None
        texts = {token: self.tokenizer.token_bytes(token) for token in allowed}
        longest = max(allowed, key=lambda token: len(texts[token]))
        return longest if all(texts[longest].startswith(text) for text in texts.values()) else None


def steps(places: list[Place]) -> int:
    """The steps that an output takes: each gives the drafts that are right, and one token more."""
    count = at = 0
    while at < len(places):
        kept = 0
        while kept < DRAFTS and at + kept < len(places) and places[at + kept].drafted:
            kept += 1
        at, count = at + kept + 1, count + 1
    return count


def main() -> None:
    walker = Walker(Tokenizer.from_dir(sys.argv[1]) if len(sys.argv) > 1 else Tokenizer.from_dir(weights_dir()))
    print(f"| {walker.tokenizer.vocab_size:,} tokens | certain | one text | its longest token | steps a token |")
    print("|---|---:|---:|---:|---:|")
    for name, draw in (("person", person), ("tool call", call), ("20 fields", fields)):
        for compact in (False, True):
            rng, outputs = random.Random(0), []
            for _ in range(OUTPUTS):
                value = draw(rng)
                form = StructuredOutputs(json=schema_of(value), disable_any_whitespace=compact)
                separators = (",", ":") if compact else (", ", ": ")
                outputs.append(walker.walk(form, json.dumps(value, separators=separators)))
            places = [place for output in outputs for place in output]
            certain = sum(place.allowed == 1 for place in places) / len(places)
            guessed = [place.drafted for place in places if place.drafted is not None]
            right = sum(guessed) / max(1, len(guessed))
            spent = sum(map(steps, outputs)) / len(places)
            label = f"{name}, {'compact' if compact else 'with spaces'}"
            print(f"| {label} | {certain:.1%} | {len(guessed) / len(places):.0%} | {right:.0%} | {spent:.2f} |")


if __name__ == "__main__":
    main()
