"""Page groups of a model, and their rules: which pages of a row its layers may still read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple, Protocol


class PageRule(Protocol):
    """A pure function of positions. A page that has passed for some token has passed for all later ones."""

    @property
    def kind(self) -> str:
        """Return its name, which tiers keep with the pages."""

    @property
    def window(self) -> int:
        """Return the most tokens that one token reads, its own included; 0 for all before it."""

    def passed(self, tokens: int, page_size: int) -> range:
        """Return the entries of a row that the last of its first `tokens` tokens does not read."""


class FullRule(NamedTuple):
    """A token reads all before it."""

    window: int = 0
    kind: str = "full"

    def passed(self, tokens: int, page_size: int) -> range:
        return range(0)


class WindowRule(NamedTuple):
    """A token reads the last `window` tokens, its own included."""

    window: int
    kind: str = "window"

    def passed(self, tokens: int, page_size: int) -> range:
        return range(max(0, tokens - self.window) // page_size)


FULL = FullRule()


class PageGroup(NamedTuple):
    """Layers of a model whose KV has one page shape and one rule."""

    name: str = "kv"
    rule: PageRule = FULL


def live(rule: PageRule, pages: int, page_size: int) -> Iterable[int]:
    """Return the entries, of a row's first `pages`, that a token after them may read."""
    passed = rule.passed(pages * page_size, page_size)
    return chain(range(passed.start), range(passed.stop, pages))
