"""StopMatcher: finds stop strings in a stream of text, across the borders of tokens and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Finds the first stop string of a growing text.

    The match is the one that ends first; of two that end together, the longer. Text is given out as soon as it can no
    longer be part of a match, so the held text is its longest end that a stop string begins with.
    With `include`, the text ends with the stop string; else before it.
    """

    __slots__ = ("_held", "_include", "_states", "_strings", "_tables")

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._tables = [_failures(string) for string in self._strings]
        self._states = [0] * len(self._strings)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to give out, the stop string found or None). Nothing may be pushed after a match."""
        found, end = None, len(text)
        for i, string in enumerate(self._strings):
            at = self._advance(i, text, end)
            if at is not None and (found is None or at < end or len(string) > len(found)):
                found, end = string, at
        whole = self._held + text
        if found is None:
            cut = len(whole) - max(self._states, default=0)
            self._held = whole[cut:]
            return whole[:cut], None
        cut = len(self._held) + end - (0 if self._include else len(found))
        self._held = ""
        return whole[:cut], found

    def _advance(self, i: int, text: str, limit: int) -> int | None:
        """Move string i's state over text[:limit]; where it first matches, return the index after the match."""
        string, table, state = self._strings[i], self._tables[i], self._states[i]
        if state == 0 and string[0] not in text:
            return None
        for at in range(limit):
            char = text[at]
            while state and string[state] != char:
                state = table[state - 1]
            if string[state] == char:
                state += 1
                if state == len(string):
                    return at + 1
        self._states[i] = state
        return None

    def finish(self) -> str:
        """The text held back, when no more will come."""
        rest, self._held = self._held, ""
        return rest


@lru_cache(maxsize=256)
def _failures(string: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest proper prefix that is also its end (Knuth, Morris, Pratt)."""
    table = [0] * len(string)
    state = 0
    for i in range(1, len(string)):
        while state and string[i] != string[state]:
            state = table[state - 1]
        if string[i] == string[state]:
            state += 1
        table[i] = state
    return tuple(table)
