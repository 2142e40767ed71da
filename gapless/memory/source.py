"""Pages that no pool holds: how the planner asks for them, wherever they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gapless.base.records import Int32s, KVTransfer
from gapless.memory.index import Match
from gapless.memory.prefix import PrefixChain


class Lookup(NamedTuple):
    """A waiting row that asks for pages of its known tokens."""

    key: int
    chain: PrefixChain
    tokens: Int32s
    most: int
    """Leading pages that it may share"""
    pages: int
    """Pages that it holds once it runs"""
    short: Callable[[int], int]
    """Pages that the pools lack to admit it with this number of shared pages; 0 or less: it fits"""
    transfer: KVTransfer


class PageSource(Protocol):
    """Keeper of pages beyond the pools. No method waits; all are called by the planner."""

    @property
    def loading(self) -> bool:
        """Return whether pages are being loaded; any row may share them."""

    def runs(self, rows: int) -> None:
        """Note the number of running rows: each may need a page at any step."""

    def waits(self, row: Lookup) -> bool:
        """Return whether a row still waits for pages that it asked for."""

    def loads(self, row: Lookup, match: Match) -> bool:
        """Return whether a row with this match begins to wait for further pages."""

    def admitted(self, key: int, matched: int, missed: int) -> int:
        """Note a row admitted with `matched` pages, and `missed` ones computed; return how many it waited for."""

    def give_up(self, key: int) -> None:
        """Drop the loads of a row that ends while it waits."""

    def offers(self, name: str) -> None:
        """Announce a queued row to peers that may take its pages."""

    def offered(self, name: str, digests: Sequence[bytes]) -> None:
        """Note the end of such a row: peers get these pages, or without digests no more than they have."""


class NoSource(PageSource):
    """The source of an engine that keeps no page beyond its pools."""

    loading = False

    def runs(self, rows: int) -> None:
        """Do nothing."""

    def waits(self, row: Lookup) -> bool:
        return False

    def loads(self, row: Lookup, match: Match) -> bool:
        return False

    def admitted(self, key: int, matched: int, missed: int) -> int:
        return 0

    def give_up(self, key: int) -> None:
        """Do nothing."""

    def offers(self, name: str) -> None:
        """Do nothing."""

    def offered(self, name: str, digests: Sequence[bytes]) -> None:
        """Do nothing."""


NO_SOURCE = NoSource()
