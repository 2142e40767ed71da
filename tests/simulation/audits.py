"""Checks of the host tier and its peers from outside the engine, which does not track these rules itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gapless.offload.copies import PageCopy
from gapless.offload.host import HostTier, MoveBatch
from gapless.offload.transfers import Transfers


class TierAudit:
    """Wraps methods of the host tier, of the tiers below it and of loads, and asserts rules on each call."""

    def __init__(self, transfers: Transfers, clock: Callable[[], int]) -> None:
        self._host: HostTier = transfers.host
        self._clock = clock
        self._load_lacking, self._poll = self._host.below.load_lacking, self._host.below.poll
        self._begin = transfers.bulk_in.begin
        self.spoils: Callable[[PageCopy], None] | None = None
        """Called with the next copy that is loaded, to corrupt it; the copy is then put in doubt during the load"""
        self._host.below.load_lacking = self.load_lacking  # type: ignore[method-assign]
        self._host.below.poll = self.poll  # type: ignore[method-assign]
        transfers.bulk_in.begin = self.begin  # type: ignore[method-assign]

    def load_lacking(self, search: Any, missing: Sequence[Any]) -> None:
        """Assert that loading the missing pages of a request evicts none of its pages that the host has."""
        had = [copy for group, digest in missing if (copy := group.find(digest)) is not None]
        self._load_lacking(search, missing)
        lost = [copy.digest for copy in had if copy.gone]
        assert not lost, f"{len(lost)} pages that a request has made room for others of it"

    def poll(self) -> bool:
        """Assert that overdue borrowed pages have gone back to the peer, unless a load reads them."""
        leases = [lease for lease in self._host.below.leases.values() if lease.late_at < self._clock()]
        late = [copy for lease in leases for copy in lease.copies if not copy.pins]
        came = self._poll()
        assert all([copy.gone for copy in late]), "what a peer has lent is late, and nothing reads it"
        return came

    def begin(self, batch: MoveBatch, since: int) -> int:
        """Assert that no load begins of overdue pages; corrupt its first copy if `spoils` is set."""
        late = [move for move in batch.moves if move.copy.lease is not None and move.copy.lease.late_at < since]
        assert not late, "a load begins of pages that have to go back to the peer"
        first, spoils = batch.moves[0].copy, self.spoils
        if spoils is None or first.lease is not None:
            return self._begin(batch, since)
        spoils(first)
        self.spoils, count = None, self._begin(batch, since)
        first.group.hidden(first.digest)
        return count
