"""Grammars: compiled grammars by what they came from, and the limits of their compilation and masks."""

from __future__ import annotations

import random
import time
from collections import OrderedDict

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.structured import StructuredOutputs
from gapless.grammar.library import LlgMatcher, warnings
from gapless.grammar.matcher import FormMatcher, Grammar
from gapless.grammar.source import fault, write_grammar
from gapless.grammar.thinking import after_thinking
from gapless.grammar.trial import LIMITS, Trial, is_small
from gapless.grammar.vocabulary import Vocabulary

KEPT_GRAMMARS, KEPT_BYTES = 128, 256 << 20
"""Compiled grammars that are kept, and what these may take; the least recently used ones are dropped first."""
GRAMMAR_BYTES, BYTES_A_CHARACTER = 128 << 10, 150
"""What a compiled grammar takes, and more for each character of its text: measured for forms of several kinds, where
the most was 143, of optional properties. The library does not say."""
WALKS, WALK_TOKENS, WALK_SECONDS = 2, 40, 0.01
"""Outputs that are drawn at random when a grammar has been compiled, tokens of each, and processor time for all."""


class Grammars:
    """Makes matchers, and keeps compiled grammars for requests to come. One thread uses it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.compiled = self.compile_ns = self.hits = 0
        self._vocabulary = vocabulary
        self._scratch = np.empty(-(-vocabulary.tokens.size // 32), np.int32)
        marks = [vocabulary.tokens.tokenize(mark) for mark in '"]},:']
        self._marks = [tokens[0] for tokens in marks if len(tokens) == 1]
        self._kept: OrderedDict[tuple[str, StructuredOutputs], Grammar | RequestError] = OrderedDict()
        """Grammars, or why there is none"""
        self._bytes: dict[tuple[str, StructuredOutputs], int] = {}
        """What these take, by estimate"""
        self._trial = Trial(vocabulary.tokens.size, vocabulary.added, vocabulary.ends)

    def close(self) -> None:
        """End what compiles grammars first."""
        self._trial.close()

    def matcher(self, form: StructuredOutputs, stop_ids: tuple[int, ...]) -> FormMatcher:
        """Return a matcher of a request's own. Raises RequestError."""
        key = (form.where, form)
        found = self._kept.get(key)
        if found is None or (isinstance(found, Grammar) and found.failed):
            found = self._kept[key] = self._compile(form)
            self._bytes[key] = GRAMMAR_BYTES + BYTES_A_CHARACTER * len(form.text)
        else:
            self.hits += 1
        self._kept.move_to_end(key)
        self._drop_oldest()
        if isinstance(found, RequestError):
            raise RequestError(str(found), found.param)
        return FormMatcher(found, form, stop_ids)

    def _drop_oldest(self) -> None:
        """Keep the limits; the latest grammar stays."""
        while len(self._kept) > KEPT_GRAMMARS or (len(self._kept) > 1 and sum(self._bytes.values()) > KEPT_BYTES):
            del self._bytes[self._kept.popitem(last=False)[0]]

    def _compile(self, form: StructuredOutputs) -> Grammar | RequestError:
        began = time.perf_counter_ns()
        try:
            text = write_grammar(form, self._vocabulary.special)
            if form.thinking is not None:
                text = after_thinking(text, form.thinking, self._vocabulary, form.marks)
            if not is_small(form) and (reason := self._trial.refusal(text)):
                return fault(form, reason)
            tokens = self._vocabulary.marked(form.marks)
            made = LlgMatcher.compile(tokens, text, LIMITS)
            reason = made.error or warnings(tokens, text, LIMITS) or self._rehearse(made)
            return fault(form, reason) if reason else Grammar(made, self._vocabulary.texts)
        except RequestError as error:
            return error
        finally:
            self.compiled += 1
            self.compile_ns += time.perf_counter_ns() - began

    def _rehearse(self, matcher: LlgMatcher) -> str:
        """Draw outputs at random, which also fills the caches of the masks to come. Returns why one cannot go on."""
        end = time.thread_time() + WALK_SECONDS
        for seed in range(WALKS):
            walk, rng = matcher.copy(), random.Random(seed)
            for _ in range(WALK_TOKENS):
                if not self._starts(walk):
                    return walk.error
                if walk.stopped or time.thread_time() > end:
                    break
                walk.consume(self._draw(rng))
        return ""

    def _draw(self, rng: random.Random) -> int:
        """Draw a token that the latest mask allows: often one that ends a part of JSON, else any."""
        marks = [mark for mark in self._marks if self._scratch[mark // 32] >> mark % 32 & 1]
        if marks and rng.random() < 0.5:
            return int(rng.choice(marks))
        place = int(rng.choice(np.flatnonzero(self._scratch)))
        word = int(self._scratch[place])
        return 32 * place + rng.choice([bit for bit in range(32) if word >> bit & 1])

    def _starts(self, matcher: LlgMatcher) -> bool:
        """Compute the first mask. Returns whether that succeeds."""
        return matcher.write_mask(self._scratch)
