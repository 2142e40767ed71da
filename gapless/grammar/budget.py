"""BudgetMatcher: keeps the budget of thinking whose marks are text. Grammars count where marks are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np

from gapless.base.records import Int32s, Matcher, TokenTexts
from gapless.base.structured import Thinking


class ThinkingPlace(NamedTuple):
    """A place in an output."""

    tokens: int | None
    """Tokens of its thinking so far; -1 before the thinking, None after it"""
    text: bytes
    """The end of the text so far, as much as may begin a mark"""
    last: tuple[int, ...] = ()
    """The last tokens of the thinking, as many as its end has"""


class BudgetMatcher:
    """A Matcher around another one, or around none, which allows every token. One thread at a time calls it.

    Thinking begins with the output, or does not come; the text of its end has ended it. If the budget
    falls into an end that the model has begun in the same tokens, it completes that.
    """

    def __init__(self, thinking: Thinking, texts: TokenTexts, inner: Matcher | None, begun: str = "") -> None:
        """`begun` is what the prompt has of the output."""
        assert thinking.budget is not None and thinking.ids, "a budget without an end"
        self.texts: TokenTexts | None = texts
        self._inner = inner
        self._begin, self._end = thinking.begin.encode(), thinking.end.encode()
        self._budget, self._ids = thinking.budget, thinking.ids
        first = ThinkingPlace(-1, b"") if self._begin else ThinkingPlace(0, b"")
        self._places = [self._after(first, begun.encode())]
        """The place after each token, the last one last"""
        bits = np.ones(len(texts.ends), np.bool_)
        self._all = np.packbits(np.pad(bits, (0, -len(bits) % 32)), bitorder="little").view(np.int32)

    def advance(self, tokens: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.advance(tokens)
        assert self.texts is not None
        for token in tokens:
            text = self.texts.joined[self.texts.ends[token - 1] if token else 0 : self.texts.ends[token]]
            self._places.append(self._after(self._places[-1], text, (token,)))

    def rollback(self, count: int) -> None:
        if self._inner is not None:
            self._inner.rollback(count)
        del self._places[len(self._places) - count :]

    def copy(self) -> BudgetMatcher:
        other = copy(self)
        other._inner = None if self._inner is None else self._inner.copy()
        other._places = [*self._places]
        return other

    def write_mask(self, words: Int32s) -> None:
        thought = self._places[-1].tokens
        if self._inner is not None:
            self._inner.write_mask(words)
        else:
            words[:] = self._all
        if thought is not None and thought >= self._budget:
            token = self._due(self._places[-1].last)
            if words[token // 32] >> token % 32 & 1:  # else a character is to be finished first
                words.fill(0)
                words[token // 32] = np.uint32(1 << token % 32).view(np.int32)

    def _due(self, last: tuple[int, ...]) -> int:
        """Return the next token of the end after these tokens."""
        said = next(size for size in range(len(self._ids) - 1, -1, -1) if last[len(last) - size :] == self._ids[:size])
        return self._ids[said]

    def _after(self, place: ThinkingPlace, text: bytes, tokens: tuple[int, ...] = ()) -> ThinkingPlace:
        """Return the place after this text, which is that of these tokens."""
        if place.tokens is None:
            return place
        text = place.text + text
        if place.tokens < 0:
            said = text.lstrip()
            if said.startswith(self._begin):
                return self._after(ThinkingPlace(0, b""), said[len(self._begin) :])
            return ThinkingPlace(-1 if self._begin.startswith(said) else None, text)
        last = (*place.last, *tokens)[-len(self._ids) :]
        if self._end in text or last == self._ids:
            return ThinkingPlace(None, b"")
        return ThinkingPlace(place.tokens + len(tokens), text[-len(self._end) :], last)
