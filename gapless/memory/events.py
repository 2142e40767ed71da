"""KV events: changes of the prefix index for other programs. No torch and no I/O here.

A page is announced when it is settled and its tokens are known, and retracted when it leaves the index. Pages that
leave before are never mentioned. Nothing is logged: untaken events are a set of pages, so they cannot outgrow the
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gapless.base.records import Int32s, PageChange, PageEvent
from gapless.memory.pages import PageListener, PagePool
from gapless.memory.prefix import PrefixChain


class GroupEvents(PageListener):
    """The indexed pages of one group, each silent, coming or announced."""

    def __init__(self, number: int, pool: PagePool, restart: Callable[[], None]) -> None:
        self.pool = pool
        self.silent: set[bytes] = set()
        """Pages with unknown tokens: they came from elsewhere, and no sequence has claimed them yet."""
        self.coming: dict[bytes, PageEvent] = {}
        """Pages to announce once they are settled"""
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
        """Announce no page until a sequence claims it again."""
        self.silent = set(self.pool.digest_of.values())
        self.coming.clear()
        self.announced.clear()
        self.removed_since.clear()

    def describe(self, chain: PrefixChain, tokens: Int32s, first: int, end: int) -> None:
        """Let pages first..end of a sequence with these tokens be announced under the digests of `chain`."""
        size, digests, window = self.pool.page_size, chain.digests, self.pool.rule.window
        for number in range(first, end) if self.silent else ():
            if digests[number] in self.silent:
                self.silent.remove(digests[number])
                own = tokens[number * size : (number + 1) * size].astype(np.int32)  # a copy
                parent = digests[number - 1] if number else None
                self.coming[digests[number]] = PageEvent(
                    PageChange.STORED, self._number, (digests[number],), parent, own, chain.salt, chain.adapter, window
                )

    def take(self) -> list[PageEvent]:
        """Return the removed and the newly settled pages, an event each."""
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
    """The events of all groups since its creation. `name_of` maps an adapter's digest to its name."""

    def __init__(self, pools: Sequence[PagePool], name_of: Callable[[str], str] = str) -> None:
        self.groups = [GroupEvents(number, pool, self.restart) for number, pool in enumerate(pools)]
        self._name_of = name_of
        self._cleared = True
        self.restart()

    def restart(self) -> None:
        """Restart with a PageChange.CLEARED: the index was emptied, or events were lost."""
        self._cleared = True
        for group in self.groups:
            group.restart()

    def take(self) -> list[PageEvent]:
        """Return the changes since the last call, in an applicable order."""
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
    """Return whether the page of one event directly follows that of another."""
    if event.change is not last.change or event.group != last.group:
        return False
    return event.change is PageChange.REMOVED or event.parent == last.digests[-1]
