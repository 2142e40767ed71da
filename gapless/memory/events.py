"""KV events: what another program may know of the prefix index. No torch and no I/O here.

A page is announced when it is settled and its tokens are known, and taken back when it leaves the index. What leaves
before that is never mentioned. Nothing is logged: what is not taken stays a set of pages, so it cannot outgrow them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gapless.base.records import Int32s, PageChange, PageEvent
from gapless.memory.pages import PageListener, PagePool
from gapless.memory.prefix import PrefixChain


class GroupEvents(PageListener):
    """The pages of one group: each indexed page is silent, coming or announced."""

    def __init__(self, number: int, pool: PagePool, restart: Callable[[], None]) -> None:
        self.pool = pool
        self.silent: set[bytes] = set()
        """Pages whose tokens are not known: they came from elsewhere, and no sequence has claimed them yet."""
        self.coming: dict[bytes, PageEvent] = {}
        """Pages that are announced as soon as they are settled"""
        self.announced: set[bytes] = set()
        self.removed_since: list[PageEvent] = []
        self._number = number
        self._restart = restart
        pool.journal = self

    def published(self, page: int, digest: bytes) -> None:
        self.silent.add(digest)

    def removed(self, digest: bytes) -> None:
        if digest in self.announced:
            self.announced.remove(digest)
            self.removed_since.append(PageEvent(PageChange.REMOVED, self._number, (digest,)))
        self.silent.discard(digest)
        self.coming.pop(digest, None)

    def forgotten(self) -> None:
        self._restart()

    def restart(self) -> None:
        """Mention no page until a sequence claims it again."""
        self.silent = set(self.pool.digest_of.values())
        self.coming.clear()
        self.announced.clear()
        self.removed_since.clear()

    def describe(self, chain: PrefixChain, tokens: Int32s, first: int, end: int) -> None:
        """Pages first..end of a sequence with these tokens have the digests of `chain`: they may be announced."""
        size, digests, window = self.pool.page_size, chain.digests, self.pool.group.window
        for number in range(first, end) if self.silent else ():
            if digests[number] in self.silent:
                self.silent.remove(digests[number])
                own = tokens[number * size : (number + 1) * size].astype(np.int32)  # a copy
                parent = digests[number - 1] if number else None
                self.coming[digests[number]] = PageEvent(
                    PageChange.STORED, self._number, (digests[number],), parent, own, chain.salt, chain.adapter, window
                )

    def take(self) -> list[PageEvent]:
        """Return what was removed and what has settled, a page each."""
        found, self.removed_since = self.removed_since, []
        for digest, event in [*self.coming.items()]:
            page = self.pool.find(digest)
            assert page is not None, "a page left the index unseen"
            if self.pool.settled(page):
                del self.coming[digest]
                self.announced.add(digest)
                found.append(event)
        return found


class PageEvents:
    """Collects the events of all groups, from its making on. `name_of` makes a name of an adapter's digest."""

    def __init__(self, pools: Sequence[PagePool], name_of: Callable[[str], str] = str) -> None:
        self.groups = [GroupEvents(number, pool, self.restart) for number, pool in enumerate(pools)]
        self._name_of = name_of
        self._cleared = True
        self.restart()

    def restart(self) -> None:
        """Begin again with a PageChange.CLEARED: the index was emptied, or events were lost on their way."""
        self._cleared = True
        for group in self.groups:
            group.restart()

    def take(self) -> list[PageEvent]:
        """Return what has changed since the last call, in an order in which it may be applied."""
        found = [PageEvent(PageChange.CLEARED)] if self._cleared else []
        self._cleared = False
        runs: list[list[PageEvent]] = []
        for event in [event for group in self.groups for event in group.take()]:
            if runs and _follows(event, runs[-1][-1]):
                runs[-1].append(event)
            else:
                runs.append([event])
        return found + [self._joined(run) for run in runs]

    def _joined(self, run: Sequence[PageEvent]) -> PageEvent:
        first = run[0]
        return first._replace(
            digests=tuple([event.digests[0] for event in run]),
            tokens=np.concatenate([event.tokens for event in run]),
            adapter=self._name_of(first.adapter) if first.adapter else "",
        )


def _follows(event: PageEvent, last: PageEvent) -> bool:
    """Return whether the page of one event may stand after that of another."""
    if event.change is not last.change or event.group != last.group:
        return False
    return event.change is PageChange.REMOVED or event.parent == last.digests[-1]
