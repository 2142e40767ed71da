"""What a router knows of an engine's prefix index: a dictionary to which page events are applied."""

from __future__ import annotations

from gapless.base.records import PageChange


class Router:
    """Applies events; fails for a page that is stored twice or removed without being there."""

    def __init__(self, hasher):
        self._hasher = hasher
        self.groups = {}
        self.stored = self.removed = self.cleared = 0

    def known(self, group=0):
        return self.groups.setdefault(group, set())

    def apply(self, events):
        for event in events:
            known = self.known(event.group)
            if event.change is PageChange.CLEARED:
                self.groups.clear()
                self.cleared += 1
            elif event.change is PageChange.REMOVED:
                known.difference_update(found := known & {*event.digests})
                assert len(found) == len(event.digests), "removed without being there"
                self.removed += len(found)
            else:
                before = event.parent or self._hasher.root(event.salt, event.adapter)
                assert self._hasher.after(before, event.tokens) == [*event.digests], "tokens of other pages"
                assert not known & {*event.digests}, "stored twice"
                known.update(event.digests)
                self.stored += len(event.digests)
