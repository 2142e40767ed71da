"""A model's vocabulary as llguidance reads it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.records import TokenTexts
from gapless.grammar.library import LlgTokens
from gapless.text.tokenizer import Tokenizer
from gapless.text.tokens import decoder_types

JOINING = {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"}
"""Decoders whose text is the bytes of the tokens, one after the other, but for a space at its beginning."""


class Vocabulary:
    """A vocabulary, made once for an engine: a large one takes most of a second."""

    def __init__(
        self, texts: Sequence[bytes], special: frozenset[int], ends: tuple[int, ...], added: Mapping[str, int]
    ) -> None:
        """`texts` are the bytes of each token, `special` the special ones, ends of sequence among them."""
        self.ends = ends
        self.added = {text: token for text, token in added.items() if token < len(texts)}
        """Tokens that were added to the vocabulary whole, by text"""
        self.special = {text: token for text, token in self.added.items() if token in special}
        """Special tokens, as grammars name them"""
        self._texts, self._special = texts, special
        self.texts = TokenTexts(b"".join(texts), np.cumsum([len(text) for text in texts]).astype(np.uint32))
        self._made: dict[frozenset[int], LlgTokens] = {}
        self.tokens = self.marked(())

    def marked(self, marks: Collection[str]) -> LlgTokens:
        """Return the vocabulary whose added tokens of these texts match as tokens only, as special ones do."""
        ids = self.kept_apart(marks)
        if ids not in self._made:
            self._made[ids] = LlgTokens(self._texts, ids, self.ends)
        return self._made[ids]

    def tokenized(self, text: str, marks: Collection[str]) -> list[int]:
        """Return the tokens of a text. Special tokens and `marks` are not split."""
        ids, known = self.kept_apart(marks), sorted(self.added, key=len, reverse=True)
        apart = "|".join(re.escape(one) for one in known if one in text and self.added[one] in ids)
        pieces = re.split(f"({apart})", text) if apart else [text]
        return [t for i, one in enumerate(pieces) for t in ([self.added[one]] if i % 2 else self.tokens.tokenize(one))]

    def kept_apart(self, marks: Collection[str]) -> frozenset[int]:
        """Return the tokens that are no text: special ones, and added ones of these texts."""
        return self._special | {self.added[text] for text in marks if text in self.added}


def make_vocabulary(tokenizer: Tokenizer, size: int, eos_ids: tuple[int, ...]) -> Vocabulary:
    """Build the vocabulary of a model with `size` logits. Raises RequestError where forms cannot be honoured."""
    name = "structured_outputs"
    if not set(decoder_types(tokenizer.backend)) & JOINING or set(decoder_types(tokenizer.backend)) - JOINING:
        raise RequestError(f"{name}: this model's text is not the bytes of its tokens, so no form can be kept", name)
    ends = tuple(token for token in eos_ids if token < size)
    if not ends:
        raise RequestError(f"{name}: this model has no end-of-sequence token, which a form ends with", name)
    # The model may have logits for more ids than the tokenizer has tokens, or for fewer.
    texts = [tokenizer.token_bytes(token) for token in range(size)]
    special = frozenset(token for token in (*tokenizer.special_ids, *ends) if token < size)
    return Vocabulary(texts, special, ends, tokenizer.added)
