"""StopMatcher: finds stop strings in a stream of text, across the borders of tokens and chunks."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string of a growing text.

    The match is the one that ends first; of two that end together, the longer. Text is given out as soon as it can no
    longer be part of a match, so what is held back is the longest end of the text that a stop string begins with.
    With `include`, the text ends with the stop string; else before it.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to give out, the stop string found or None). Nothing may be pushed after a match."""
        whole, self._held = self._held + text, ""
        matches = [(whole.find(one) + len(one), -len(one), one) for one in self._strings if one in whole]
        if matches:
            end, _, found = min(matches)
            return whole[: end if self._include else end - len(found)], found
        cut = len(whole) - max((_overlap(whole, one) for one in self._strings), default=0)
        self._held = whole[cut:]
        return whole[:cut], None

    def finish(self) -> str:
        """The text held back, when no more will come."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest end of `text` that `string` begins with, and is longer than."""
    at = text.find(string[0], max(0, len(text) - len(string) + 1))
    while at >= 0 and not string.startswith(text[at:]):
        at = text.find(string[0], at + 1)
    return len(text) - at if at >= 0 else 0
