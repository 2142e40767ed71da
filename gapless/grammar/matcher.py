"""FormMatcher: follows one request's output through its form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from copy import copy
from weakref import WeakSet

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.records import Int32s, MatcherFunctions, TokenTexts
from gapless.base.structured import StructuredOutputs
from gapless.grammar.library import LlgMatcher, matcher_functions

_FORMS = itertools.count()


class Grammar:
    """A compiled grammar; each request gets a copy. All copies share the states of one lexer."""

    def __init__(self, matcher: LlgMatcher, texts: TokenTexts, compile_ns: int) -> None:
        self.matcher = matcher
        """Has taken over no token."""
        self.texts = texts
        self.compile_ns = compile_ns
        """Processor time of its compilation"""
        self.lexer = (next(_FORMS), 0)
        """The number of its form, and of its lexer within the form"""
        self.users: WeakSet[FormMatcher] = WeakSet()
        """The matchers of requests that are served"""
        self.failed = False
        """Whether a request's output could not continue. The lexer may have as many states as its limit allows."""


class FormMatcher:
    """A Matcher and NativeMatcher over llguidance's, which it owns. One thread at a time calls it.

    Where the output may end, the request's `stop_ids` may come beside the model's end-of-sequence tokens. Raises
    RequestError when the form takes more work than the limits of the compiler allow, or no token can follow.
    """

    def __init__(self, grammar: Grammar, form: StructuredOutputs, stop_ids: Sequence[int]) -> None:
        self.texts: TokenTexts | None = grammar.texts
        self.lexer = grammar.lexer
        self._grammar = grammar
        grammar.users.add(self)
        self._matcher = grammar.matcher.copy()
        self._form = form
        self._ends = frozenset(stop_ids)
        self._words = [token // 32 for token in stop_ids]
        self._bits = np.array([1 << token % 32 for token in stop_ids], np.uint32).view(np.int32)
        self._ended = 0
        """Tokens taken over since the end of the output"""

    def begin(self, tokens: Sequence[int]) -> bool:
        """Take over the output's beginning from the prompt. After False, as no output begins so, it is of no use."""
        return all(map(self._matcher.consume, tokens))

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # llguidance counts its own end tokens at some ends and not at others, so none is passed on.
            if self._ended or (token in self._ends and self._matcher.accepts):
                assert token in self._ends, f"token {token} came after the end of the output"
                self._ended += 1
            elif not self._matcher.consume(token):
                raise self.failure(self._matcher.error)

    def rollback(self, count: int) -> None:
        beyond = min(count, self._ended)
        self._ended -= beyond
        if count > beyond and not self._matcher.rollback(count - beyond):
            raise self.failure(self._matcher.error)

    def copy(self) -> FormMatcher:
        other = copy(self)
        other._matcher = self._matcher.copy()
        return other

    def write_mask(self, words: Int32s) -> None:
        if self._ended:
            words.fill(0)
        elif not self._matcher.write_mask(words):
            raise self.failure(self._matcher.error)
        if self._ended or self._matcher.accepts:
            for word, bit in zip(self._words, self._bits, strict=True):
                words[word] |= bit

    def give_away(self) -> tuple[MatcherFunctions, int]:
        return matcher_functions(), self._matcher.give_away()

    def failure(self, reason: str) -> RequestError:
        self._grammar.failed = True
        line = next(iter(reason.splitlines()), "no token can follow")
        return RequestError(f"{self._form.where}: the output cannot go on: {line[:300]}", self._form.where)
