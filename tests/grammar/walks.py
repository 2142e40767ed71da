"""Sampling by masks alone: what a model may say under a form, drawn at random."""

import random
from functools import cache

import numpy as np
from vocabularies import byte_level

from gapless.base.structured import StructuredOutputs
from gapless.demo import weights_dir
from gapless.grammar.kept import Grammars
from gapless.grammar.vocabulary import make_vocabulary
from gapless.text.tokenizer import Tokenizer

CLOSING = '"@}]:,Z.0'
"""Characters that bring JSON to its end, the best first"""


class Speaker:
    """A vocabulary of `size` tokens, of which `eos` ends an output, and what it can say."""

    def __init__(self, tokenizer: Tokenizer, padding: int) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size + padding
        self.eos = tokenizer.eos_token_id
        self.vocabulary = make_vocabulary(tokenizer, self.size, (self.eos,))
        self.grammars = Grammars(self.vocabulary)
        self.words = np.zeros(-(-self.size // 32), np.int32)
        self.bytes = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.closing = [tokenizer.backend.token_to_id(text) for text in CLOSING]

    def matcher(self, form: StructuredOutputs, stop_ids: tuple[int, ...] = ()):
        return self.grammars.matcher(form, (*stop_ids, self.eos))

    def allowed(self, matcher) -> np.ndarray:
        """The ids that the matcher's mask allows now."""
        matcher.write_mask(self.words)
        return np.flatnonzero(np.unpackbits(self.words.view(np.uint8), bitorder="little"))

    def choose(self, allowed: np.ndarray, rng: random.Random, soon: bool) -> int:
        """Any allowed token; with `soon`, most often one that brings the end nearer."""
        if soon and rng.random() < 0.8:
            for token in (self.eos, *self.closing):
                if token in allowed:
                    return token
        return int(rng.choice(allowed))

    def say(self, form: StructuredOutputs, seed: int, freely: int = 30, most: int = 4_000) -> str:
        """Draw an output: `freely` tokens at random, and then to the end."""
        matcher, rng, said = self.matcher(form), random.Random(seed), []
        while len(said) < most:
            token = self.choose(self.allowed(matcher), rng, len(said) >= freely)
            matcher.advance([token])
            if token == self.eos:
                return b"".join(said).decode()
            said.append(self.bytes[token])
        raise AssertionError(f"no end of {form} after {b''.join(said)[-100:]!r}")

    def accepts(self, form: StructuredOutputs, text: str) -> bool:
        """Return whether the form allows this text as a whole output."""
        matcher = self.matcher(form)
        for token in (*self.tokenizer.encode(text, False), self.eos):
            if token not in self.allowed(matcher):
                return False
            matcher.advance([token])
        return True


@cache
def demo() -> Speaker:
    """The demo model's tokenizer; its model has more logits than the tokenizer has tokens."""
    return Speaker(Tokenizer.from_dir(weights_dir()), padding=10)


@cache
def single_bytes() -> Speaker:
    return Speaker(byte_level(), padding=0)


SPEAKERS = {"demo": demo, "bytes": single_bytes}
