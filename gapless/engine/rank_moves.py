"""Transfers of pages that the ranks of an engine make together, as their leader keeps count of them."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.base.records import MoveOrder

MOVE_LOOKS = 300
"""Looks without an answer until a rank counts as hung: transfers take milliseconds"""


class OpenMove:
    """A transfer that has been ordered."""

    def __init__(self, order: MoveOrder) -> None:
        self.order = order
        self.said: dict[int, bytes] = {}
        """Checksums by rank"""
        self.looks = 0

    def __str__(self) -> str:
        what = "a store" if self.order.stores else "a load"
        return f"{what} of {sum([count for _, count in self.order.counts])} pages"


class RankMoves:
    """The transfers that some rank has not ended. The watcher's thread enters answers, the loop's takes them."""

    def __init__(self, world: int) -> None:
        self._others = range(1, world)
        self._open: dict[tuple[bool, int], OpenMove] = {}

    def sent(self, order: MoveOrder) -> None:
        """Note an order, before any rank can answer."""
        self._open[order.stores, order.number] = OpenMove(order)

    def said(self, rank: int, stores: bool, number: int, checksums: bytes) -> None:
        """Note a rank's answer. Raises ValueError for one to no question."""
        move = self._open.get((stores, number))
        if move is None or len(checksums) not in (0, 8 * sum([count for _, count in move.order.counts])):
            raise ValueError(f"an answer to no transfer, {'out' if stores else 'in'} {number}")
        move.said[rank] = checksums

    def ended(self, stores: bool, number: int) -> Sequence[bytes] | None:
        """Return all ranks' checksums, once; None while some lack."""
        said = self._open[stores, number].said
        if len(said) < len(self._others):
            return None
        del self._open[stores, number]
        return [said[rank] for rank in self._others]

    def late(self) -> str:
        """Look once at all; return which rank has taken too long for what, or nothing."""
        for move in [*self._open.values()]:
            lacking = [rank for rank in self._others if rank not in move.said]
            move.looks += bool(lacking)
            if move.looks >= MOVE_LOOKS:
                return f"rank {lacking[0]} has not ended {move}"
        return ""

    def report(self) -> str:
        """Return the open transfers, a line each."""
        lines = [f"{move}: ended on ranks {sorted(move.said)}\n" for move in [*self._open.values()]]
        return "".join(["transfers of pages:\n", *[f"  {line}" for line in lines]]) if lines else ""
