"""A rank's share of an engine that several processes compute together."""

from __future__ import annotations

from typing import NamedTuple


class Share(NamedTuple):
    """One of `world` ranks, each with an equal part of every layer."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank plans and samples for all."""
        return self.rank == 0

    def part(self, count: int) -> tuple[int, int]:
        """Return the first of this rank's units and the one after its last, of `count` that the ranks share equally."""
        assert not count % self.world, f"{count} units are not shared by {self.world} ranks"
        return self.rank * count // self.world, (self.rank + 1) * count // self.world

    def of(self, rank: int) -> Share:
        """Return another rank's share."""
        return self._replace(rank=rank)


WHOLE_SHARE = Share()
"""The share of an engine's only rank"""
