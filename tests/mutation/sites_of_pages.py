"""Protections of pages, bounds and lanes: the doors of a prefix, pins, windows, rows that are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from mutation.tools import Site, both, replaced
from simulation.scenario import Scenario

from gapless.base.records import Flag
from gapless.kernels import plain
from gapless.kernels.layout import COMPUTED, PACKET_SLOT
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import ALREADY_PASSED, PagePool, Pin
from gapless.plan.bounds import Bounds
from gapless.plan.decode import DecodeSet
from gapless.plan.pages import RowPages
from gapless.plan.planner import Planner
from gapless.step.executor import Executor
from gapless.step.lanes.score import ScoreKey
from gapless.step.listing import Lanes

# Two doors of a prefix: what a step may read, and what a transfer may read.


def share_before_computed() -> AbstractContextManager[None]:
    """All pages of a prompt are shared with its first chunk, those of later chunks too."""

    def run(original: Callable[..., int], self: Planner, row: Any, *args: Any, **kwargs: Any) -> int:
        size = original(self, row, *args, **kwargs)
        if size and self.index and not self.pages.slide_away:
            self.pages.publish(row, row.length, self.step + 1)
        return size

    return replaced(Planner, "_run", run)


def share_the_last_page_early() -> AbstractContextManager[None]:
    """A page counts as full one token before its KV is."""
    return replaced(RowPages, "publish", lambda publish, self, row, done, step: publish(self, row, done + 1, step))


def any_page_may_be_stored() -> AbstractContextManager[None]:
    """A transfer takes pages whose step has not been observed."""
    return replaced(PagePool, "settled", lambda _, self, page: page in self.digest_of)


def store_without_pin() -> AbstractContextManager[None]:
    """A page may be given to another while its store reads it."""

    def unpin(
        original: Callable[..., None], self: PagePool, pages: Any, at: Any = ALREADY_PASSED, kind: Pin = Pin.REQUEST
    ) -> None:
        original(self, pages, ALREADY_PASSED if at[0] is Clock.BULK_OUT else at, kind)

    return replaced(PagePool, "unpin", unpin)


def load_published_at_once() -> AbstractContextManager[None]:
    """A page is shared while its load is on the way."""
    return replaced(PagePool, "fill", lambda _, self, digests, transfer: self._filled(digests))


def load_without_pin() -> AbstractContextManager[None]:
    """The page that a load is to write may be given to another meanwhile; it is shared when the load has ended."""

    def fill(_: Callable[..., None], self: PagePool, digests: Mapping[int, bytes], transfer: int) -> None:
        self.unpin([*digests], kind=Pin.LOAD)
        for loaded in digests.items():
            self._ledger.retire((Clock.BULK_IN, transfer), lambda loaded: self.publish(*loaded), loaded)

    return replaced(PagePool, "fill", fill)


def clocks_run_ahead() -> AbstractContextManager[None]:
    """A transfer counts as acknowledged when it is begun."""

    def retire(original: Callable[..., None], self: Any, at: Any, release: Any, item: Any) -> None:
        original(self, at if at[0] is Clock.COMPUTE else ALREADY_PASSED, release, item)

    return replaced(Ledger, "retire", retire)


# KV in doubt.


def doubtful_pages_stay() -> AbstractContextManager[None]:
    """The pages of a row that failed, and of those that share them, stay in the index."""
    return replaced(PagePool, "hide", lambda *_: None)


def doubtful_rows_publish() -> AbstractContextManager[None]:
    """Such a row goes on publishing pages."""

    def publish(original: Callable[..., None], self: RowPages, row: Any, *args: Any) -> None:
        row.private = False
        original(self, row, *args)

    return replaced(RowPages, "publish", publish)


# Rows that get none or several tokens in a step.


def held_rows_advance() -> AbstractContextManager[None]:
    """A row that got no token goes on as if its last position had run for good."""

    def advance(original: Callable[..., None], rows: Any, line: Any, sizes: Any, given: Any, tables: Any) -> None:
        original(rows, line, sizes, given, tables)
        held = (given.flags == int(Flag.HELD)).int()
        tables.state[:, COMPUTED].index_add_(0, rows[: len(held)], held)

    return replaced(plain, "advance", advance)


def pages_for_one_token() -> AbstractContextManager[None]:
    """A row has pages for one token more than steps in flight may add, whatever the next one may."""

    def short(original: Callable[..., Any], self: Bounds, steps: int = 1) -> Any:
        most, self.most = self.most, 1
        try:
            return original(self, 1)  # nor pages in advance
        finally:
            self.most = most

    def wants(_: Callable[..., int], self: Bounds, row: int) -> int:
        tokens = min(self.length[row] + self.most * self.in_flight[row] + 1, self.limit[row]) - 1
        return int(-(-tokens // self._page_size))

    return both(replaced(Bounds, "short", short), replaced(Bounds, "wants", wants))


def bounds_count_the_least() -> AbstractContextManager[None]:
    """Steps in flight count with the fewest tokens that they add."""

    def look(original: Callable[..., None], self: Bounds) -> None:
        original(self)
        np.minimum(self.low, self.limit, out=self.high)

    return replaced(Bounds, "look", look)


def held_rows_stay_away() -> AbstractContextManager[None]:
    """A row whose last step held it does not come back."""
    return replaced(DecodeSet, "resume", lambda *_: None)


# Page groups.


def window_one_page_short() -> AbstractContextManager[None]:
    """A page of a window group goes while positions in its window are still read."""

    return replaced(
        RowPages, "slide", lambda slide, self, row, tokens, last: slide(self, row, tokens + self.size, last)
    )


def window_without_fence() -> AbstractContextManager[None]:
    """Such a page is free at once, with steps in flight that read it."""
    return replaced(RowPages, "slide", lambda slide, self, row, tokens, last: slide(self, row, tokens, 0))


def window_not_covered() -> AbstractContextManager[None]:
    """A request shares what the groups with all pages have, whatever is left in those with a window."""

    def up_to_gap(original: Callable[..., int], self: PrefixIndex, pool: PagePool, *args: Any) -> int:
        _, _, count, *_ = args
        return count if pool.rule.window else original(self, pool, *args)

    return replaced(PrefixIndex, "_up_to_gap", up_to_gap)


# Lanes.


def one_row_uncut() -> AbstractContextManager[None]:
    """The first row that has filters is missing in the list of its lane."""

    def of(original: Callable[..., Any], self: Lanes, plan: Any) -> Any:
        lists = original(self, plan)
        kept = [one._replace(samples=one.samples[one.lane.name == "cut" :]) for one in lists.lanes]
        return lists._replace(lanes=tuple([one for one in kept if one.samples]))

    return replaced(Lanes, "of", of)


def lists_stay_behind() -> AbstractContextManager[None]:
    """The lists of the lanes do not come with the packet."""
    return replaced(Executor, "lists", lambda *_: None)


def score_in_the_next_slot() -> AbstractContextManager[None]:
    """Scores go to the slot that the packet names by now, which is that of the next step."""

    def score(original: Callable[..., None], key: ScoreKey, state: Any, at: Any, index: Any) -> None:
        words = at.words.clone()
        words[PACKET_SLOT] += 1
        original(key, state, at._replace(words=words), index)

    return replaced(ScoreKey, "run", score)


def tiers(scenario: Scenario) -> bool:
    return scenario.tier


def windows(scenario: Scenario) -> bool:
    return scenario.grouped


def spoils(scenario: Scenario) -> bool:
    return any(fault.kind == "spoil" for fault in scenario.faults)


def filters(scenario: Scenario) -> bool:
    return any(job.filters for job in scenario.jobs)


SITES = (
    Site("a page is shared with the step that computes it", 1, share_before_computed),
    Site("a page is shared when its last KV is written", 16, share_the_last_page_early),
    Site("a page is stored once its step was observed", 2, any_page_may_be_stored),
    Site("a page that is stored is not given away", 3, store_without_pin, where=tiers),
    Site("a page is shared once its load is acknowledged", 7, load_published_at_once, where=tiers),
    Site("a page that is loaded is not given away", 12, load_without_pin, where=tiers),
    Site("each transfer has its number on a clock of its own", 3, clocks_run_ahead, where=tiers),
    Site("pages whose KV is in doubt are not shared", 16, doubtful_pages_stay, where=spoils),
    Site("a row whose KV is in doubt publishes no page", 16, doubtful_rows_publish, where=spoils),
    Site("a row that is held runs its last position again", 16, held_rows_advance),
    Site("a row has pages for all tokens of its next step", 11, pages_for_one_token),
    Site("steps in flight count with all their tokens", 11, bounds_count_the_least),
    Site("a row that was held at its end comes back", 16, held_rows_stay_away),
    Site("a window keeps the pages that it reads", 11, window_one_page_short, where=windows),
    Site("a window's pages wait for the steps in flight", 11, window_without_fence, where=windows),
    Site("a prefix is shared as far as all groups have it", 1, window_not_covered, where=windows),
    Site("every row with filters is in the list of its lane", 1, one_row_uncut, where=filters),
    Site("the lists of the lanes come with the packet", 1, lists_stay_behind),
    Site("scores go to their own step's outbox", 20, score_in_the_next_slot),
)
