"""How long forms of output take to compile, and a mask takes: `python benchmarks/compile_forms.py [TOKENIZER_DIR]`.

Without a directory: the demo model's tokenizer, with random tokens up to 151,936 beside its own.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

import numpy as np
from tokenizers import AddedToken

from gapless.base.structured import StructuredOutputs
from gapless.demo import weights_dir
from gapless.grammar.kept import Grammars
from gapless.grammar.vocabulary import make_vocabulary
from gapless.text.tokenizer import Tokenizer

SIZE = 151_936
TEXT = {"type": "string"}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": TEXT for number in range(count)}}


LINE = record(text={**TEXT, "maxLength": 80}, pieces={"type": "integer"}, due={**TEXT, "format": "date"})
FORMS = {
    "choice of 3": StructuredOutputs(choice=["yes", "no", "not sure"]),
    "e-mail address": StructuredOutputs(json={**TEXT, "format": "email"}),
    "2 fields": StructuredOutputs(json=record(name=TEXT, age={"type": "integer"})),
    "any JSON object": StructuredOutputs(json_object=True),
    "an order: lists, texts of at most 80 characters, dates": StructuredOutputs(
        json=record(number=TEXT, lines={"type": "array", "items": LINE, "maxItems": 10})
    ),
    "60 fields": StructuredOutputs(json=record(**{f"field{number}": TEXT for number in range(60)})),
    "choice of 8,000": StructuredOutputs(choice=[f"value {number}" for number in range(8_000)]),
    "100 optional fields": StructuredOutputs(json=optional(100)),
    "300 optional fields": StructuredOutputs(json=optional(300)),
}


def wide_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_dir(weights_dir())
    rng, letters = random.Random(0), 'abcdefghijklmnopqrstuvwxyz ABCDEFGH0123456789_-{}[]":,.'
    words = {"".join(rng.choices(letters, k=rng.randint(3, 9))) for _ in range(SIZE)}
    tokenizer.backend.add_tokens([AddedToken(word, normalized=False) for word in sorted(words)])
    return tokenizer


def main() -> None:
    tokenizer = Tokenizer.from_dir(sys.argv[1]) if len(sys.argv) > 1 else wide_tokenizer()
    eos, began = tokenizer.eos_token_id or 0, time.perf_counter()
    vocabulary = make_vocabulary(tokenizer, SIZE, (eos,))
    print(f"| vocabulary of {SIZE:,} tokens, once | {time.perf_counter() - began:.1f} s | | |")
    for name, form in FORMS.items():
        compiling = []
        for _ in range(5):
            grammars = Grammars(vocabulary)
            began = time.perf_counter()
            grammars.matcher(form, (eos,))
            compiling.append(time.perf_counter() - began)
        masks = mask_us(grammars, form, eos)
        spent = f"{statistics.median(compiling) * 1e3:.1f} ms | {statistics.median(masks):.0f} us | {max(masks):.0f} us"
        print(f"| {name} | {spent} |")


def mask_us(grammars: Grammars, form: StructuredOutputs, eos: int) -> list[float]:
    """Times to take over a token and write the next mask, along random outputs."""
    words, rng, times = np.zeros(-(-SIZE // 32), np.int32), random.Random(0), []
    for _ in range(10):
        matcher = grammars.matcher(form, (eos,))
        matcher.write_mask(words)
        for _ in range(30):
            token = int(rng.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))))
            if token == eos:
                break
            began = time.perf_counter()
            matcher.advance([token])
            matcher.write_mask(words)
            times.append((time.perf_counter() - began) * 1e6)
    return times


main()
