"""How much of a JSON output its form leaves no choice about: `python benchmarks/forced_tokens.py [TOKENIZER_DIR]`.

Walks outputs, in the tokens of their text, along the masks of their forms. Without a directory: the demo model's
tokenizer. Prints, as shares of the tokens,
- *certain*: the mask allows this token alone,
- *one text*: every allowed token begins the longest of them, so that the text is certain and its tokens are not,
and how often the longest token of such a mask is the token.

`python benchmarks/forced_tokens.py --run`: steps and tokens/s of the demo model with these forms, one row at a time and
greedily, in an engine without speculation and in one that drafts such tokens. Their tokens are equal.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.demo import weights_dir
from gapless.grammar.kept import Grammars
from gapless.grammar.vocabulary import make_vocabulary
from gapless.loop.masks import expected_next
from gapless.text.tokenizer import Tokenizer

OUTPUTS, DRAFTS, ROUNDS = 100, 4, 3
WORDS = ["amber", "basket", "copper", "dolphin", "evening", "forest", "garden", "harbour", "island", "jungle"]


class Place(NamedTuple):
    """One token of an output, by the mask that it was under."""

    allowed: int
    drafted: bool | None
    """Whether the token is the one that is expected; None where the text is not certain"""


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
    if isinstance(value, str):
        return {"type": "string", "maxLength": 20}
    return {"type": "boolean"} if isinstance(value, bool) else {"type": "integer", "minimum": 0, "maximum": 99}


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
            expected = expected_next(self._words, matcher.texts)
            places.append(Place(len(allowed), None if expected is None else expected == token))
            matcher.advance([token])
        return places


Draw = Callable[[random.Random], dict[str, Any]]
KINDS = [
    (f"{name}, {'compact' if compact else 'with spaces'}", draw, compact)
    for name, draw in (("person", person), ("tool call", call), ("20 fields", fields)) for compact in (False, True)
]  # fmt: skip


def walk() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else weights_dir()
    walker = Walker(Tokenizer.from_dir(given))
    print(f"| {walker.tokenizer.vocab_size:,} tokens | certain | one text | its longest token |")
    print("|---|---:|---:|---:|")
    for name, draw, compact in KINDS:
        places = [place for form, text in outputs_of(draw, compact) for place in walker.walk(form, text)]
        certain = sum(place.allowed == 1 for place in places) / len(places)
        guessed = [place.drafted for place in places if place.drafted is not None]
        right = sum(guessed) / max(1, len(guessed))
        print(f"| {name} | {certain:.1%} | {len(guessed) / len(places):.0%} | {right:.0%} |")


def outputs_of(draw: Draw, compact: bool) -> Iterator[tuple[StructuredOutputs, str]]:
    """Outputs drawn at random, with their forms."""
    rng, separators = random.Random(0), (",", ":") if compact else (", ", ": ")
    for _ in range(OUTPUTS):
        value = draw(rng)
        form = StructuredOutputs(json=schema_of(value), disable_any_whitespace=compact)
        yield form, json.dumps(value, separators=separators)


def play() -> None:
    config = {"method": "grammar", "num_speculative_tokens": DRAFTS}
    size: dict[str, Any] = {"device": "cpu", "max_num_seqs": 1, "max_model_len": 1024}
    print("| form | tokens | steps, without : with | drafts | right | tokens/s, with : without |")
    print("|---|---:|---:|---:|---:|---:|")
    with LLM("demo", **size) as plain, LLM("demo", **size, speculative_config=config) as drafted:
        for name, draw, compact in KINDS:
            forms = [form for form, _ in outputs_of(draw, compact)][:20]
            runs: list[list[Played]] = [[], []]
            for turn in range(ROUNDS + 1):
                a, b = (answered(llm, forms) for llm in (plain, drafted))
                assert a.tokens == b.tokens, "drafts have changed a token"
                if turn:
                    runs[0].append(a)
                    runs[1].append(b)
            ratio = statistics.median(a.seconds / b.seconds for a, b in zip(*runs, strict=True))
            steps = [statistics.median(run.steps for run in arm) for arm in runs]
            drafts, right = (sum(getattr(run, what) for run in runs[1]) for what in ("drafts", "right"))
            print(
                f"| {name} | {sum(map(len, runs[0][0].tokens)):,} | {steps[0]:,.0f} : {steps[1]:,.0f} "
                f"| {drafts // ROUNDS:,} | {right / max(1, drafts):.0%} | {ratio:.2f} |",
                flush=True,
            )


class Played(NamedTuple):
    """Answers to the same prompts, and what they took."""

    tokens: list[list[int]]
    seconds: float
    steps: int
    """Those that gave a token"""
    drafts: int
    right: int


def answered(llm: LLM, forms: list[StructuredOutputs]) -> Played:
    before, begun, tokens = llm.stats(), time.perf_counter(), []
    for number, form in enumerate(forms):
        chat = [{"role": "user", "content": " ".join(["Write the record as JSON:", *WORDS[: number % 10]])}]
        (output,) = llm.chat(
            chat, SamplingParams(temperature=0, max_tokens=300, structured_outputs=form), use_tqdm=False
        )
        tokens.append(list(output.outputs[0].token_ids))
    seconds, after = time.perf_counter() - begun, llm.stats()
    steps = after.steps - before.steps - (after.held_rows - before.held_rows)
    right = sum(after.accepted) - sum(before.accepted)
    return Played(tokens, seconds, steps, after.draft_tokens - before.draft_tokens, right)


if __name__ == "__main__":
    play() if sys.argv[1:] == ["--run"] else walk()
