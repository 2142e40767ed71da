"""The decode set: the rows that take part in every step."""

from __future__ import annotations

from gapless.plan.bounds import Bounds
from gapless.plan.row import Row, State


class DecodeSet:
    """Rows with all known tokens planned: in the set, about to enter it, or waiting outside for their last tokens."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.rows: dict[int, Row] = {}
        """The set, by number"""
        self.numbers: tuple[int, ...] | None = ()
        """The set as plans name it: the same object while it is unchanged. None: it has changed"""
        self.pages = 0
        """Upper bound of the pages of any row in the set."""
        self.entering: list[Row] = []
        self.ending: dict[int, Row] = {}
        """Rows of these states"""

    def will_enter(self, row: Row) -> None:
        row.state = State.ENTERING
        self.entering.append(row)

    def enter(self, row: Row) -> None:
        self.entering.remove(row)
        row.state = State.DECODE
        self.rows[row.number] = row
        self.numbers = None
        self._bounds.enter(row.number)

    def leave(self, row: Row, step: int) -> None:
        """Remove a row whose last step is `step`."""
        del self.rows[row.number]
        self.numbers = None
        self._bounds.leave(row.number)
        row.last_step = step

    def will_end(self, row: Row) -> None:
        row.state = State.ENDING
        self.ending[row.number] = row
        self._bounds.ends(row.number, True)

    def leave_at_end(self, step: int) -> None:
        """Remove the rows with all tokens in flight."""
        for number in self._bounds.ended():
            row = self.rows[number]
            self.leave(row, step)
            self.will_end(row)

    def resume(self) -> None:
        """Let rows that were held in flight enter again: they need more steps."""
        for number in self._bounds.resumed():
            self._bounds.ends(number, False)
            self.will_enter(self.ending.pop(number))

    def renumber(self) -> tuple[int, ...]:
        """Name the rows of the changed set."""
        self.numbers = tuple(self.rows)
        self.pages = max((len(row.pages) for row in self.rows.values()), default=0)
        return self.numbers
