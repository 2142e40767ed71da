"""Loads that a request waits for: from tiers to the host, and then to the device. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from gapless.offload.copies import Lease, PageCopy


@dataclass(slots=True, eq=False)
class LoadTicket:
    """A wait for pages being loaded to the device."""

    asked_at: int
    """Time on the device's clock, ns"""
    left: int = 0
    """Pages neither arrived nor refused"""
    given_up: bool = False
    """Whether the request stopped waiting"""


@dataclass(slots=True, eq=False)
class Search:
    """A request's search of the tiers below, and its loads from them. It waits while `open` has numbers, until late."""

    claims: bool = False
    """Whether a peer computes the pages"""
    found: dict[bytes, int] = field(default_factory=dict)
    """First tier with each page, by key"""
    open: dict[int, int] = field(default_factory=dict)
    """Unfinished questions and jobs, each with its tier"""
    late_at: int = 0
    early: int = 0
    """Pages loaded from a peer before its last answer"""
    lends: bool = False
    """Whether a peer lends its pages"""
    fits: bool = False
    """Whether the device has room for the request"""
    came: list[PageCopy] = field(default_factory=list)
    """Arrived copies, not yet loaded to the device"""
    leases: list[Lease] = field(default_factory=list)
    tickets: list[LoadTicket] = field(default_factory=list)
    """Loads to the device during the search"""
    fetched: bool = False
    """Whether loads from the tiers have begun"""
    again: bool = False
    """Whether all found pages were loaded once before"""
    weighed: tuple[int, int, float] | None = None
    """The gate's earlier question: tokens, pages, and time of the tiers below"""

    @property
    def borrows(self) -> bool:
        """Return whether a peer's pages stay in its memory until they are loaded to the device."""
        return self.lends and self.fits

    def end(self) -> None:
        """End the search, and return borrowed pages not yet loaded: the request runs or has ended."""
        self.came.clear()
        for ticket in self.tickets:
            ticket.given_up = True
        for lease in self.leases:
            lease.leave_to_others()
        self.leases.clear()

    def failed(self) -> None:
        """Note a failed or late load. After a second try of all found pages they are computed."""
        if self.again:
            self.found = {}

    def hold(self, lease: Lease) -> None:
        """Hold a peer's pages until they are loaded, or the search ends."""
        lease.holders += 1
        self.leases.append(lease)
