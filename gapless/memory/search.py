"""What a request waits for: pages that tiers bring to the host, and then to the device. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field

from gapless.memory.copies import Lease, PageCopy


@dataclass(slots=True, eq=False)
class LoadTicket:
    """What a request waits for while pages are loaded to the device."""

    asked_at: int
    """The time of the device's clock, ns"""
    left: int = 0
    """Pages that have neither come nor been refused"""
    given_up: bool = False
    """Whether the request waits no more"""


@dataclass(slots=True, eq=False)
class Search:
    """What a request asks the tiers below, and then loads from them. It waits while `open` has numbers, until late."""

    claims: bool = False
    """Whether a peer computes what it asks for"""
    found: dict[bytes, int] = field(default_factory=dict)
    """The first tier that has it, by key"""
    open: dict[int, int] = field(default_factory=dict)
    """Questions and jobs that have not ended, each with its tier"""
    late_at: int = 0
    early: int = 0
    """Pages that were loaded from a peer before it had decided about all"""
    lends: bool = False
    """Whether a peer lends what it has of them"""
    fits: bool = False
    """Whether there is room on the device for the request"""
    came: list[PageCopy] = field(default_factory=list)
    """Copies that have come, and wait to be loaded to the device"""
    leases: list[Lease] = field(default_factory=list)
    tickets: list[LoadTicket] = field(default_factory=list)
    """What is loaded to the device while it goes on"""
    fetched: bool = False
    """Whether loads from there have begun"""
    again: bool = False
    """Whether all that was found has been loaded before"""
    weighed: tuple[int, int, float] | None = None
    """What the gate was asked before: tokens, pages, and what tiers below take"""

    @property
    def borrows(self) -> bool:
        """Return whether pages of a peer stay where they are until they are loaded to the device."""
        return self.lends and self.fits

    def end(self) -> None:
        """The request runs, or is gone: give back what was borrowed and not loaded."""
        self.came.clear()
        for ticket in self.tickets:
            ticket.given_up = True
        for lease in self.leases:
            lease.leave_to_others()
        self.leases.clear()

    def failed(self) -> None:
        """A load has failed, or was late. Where all that was found had been asked for, it is computed."""
        if self.again:
            self.found = {}

    def hold(self, lease: Lease) -> None:
        """Keep what a peer lends until it is loaded, or this ends."""
        lease.holders += 1
        self.leases.append(lease)
