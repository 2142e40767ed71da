"""Pauses of an engine: requests wait outside the loop, or freeze in it, until an operator resumes them."""

from __future__ import annotations

from collections.abc import Callable

from gapless.base.records import Turn
from gapless.engine.seam import Answer, OperatorOrder
from gapless.loop.loop import Loop

WAIT_SECONDS = 1.0
"""Longest wait of a frozen loop's turn for the bell."""


class Pauses:
    """Operators' orders to a loop; its thread calls this."""

    def __init__(self, loop: Loop) -> None:
        self.waits = False
        """Whether new requests have to wait"""
        self.turn: Callable[[], Turn] = loop.turn
        """A turn of the loop, or of the frozen loop: an unpaused one pays nothing"""
        self._loop = loop
        self._answers: list[Answer] = []

    @property
    def asked(self) -> bool:
        """Whether an order is unfinished."""
        return bool(self._answers)

    @property
    def keeps(self) -> bool:
        """Whether requests in the loop are frozen."""
        return self.turn == self._frozen_turn

    def obey(self, order: OperatorOrder, answer: Answer) -> None:
        """Carry out an order. `answer` is called at its end, here or in `rested`, or when a later order ends the
        pause."""
        if order is OperatorOrder.FORGET:
            if self._loop.planner.index is not None:
                self._loop.planner.index.forget()
            answer(None)
            return
        self.waits = order is not OperatorOrder.RESUME
        if order is OperatorOrder.FREEZE:
            self.turn = self._frozen_turn
        elif self.keeps:
            self.turn, self._loop.frozen = self._loop.turn, False
            if self._loop.planner.wanting:
                self._loop.log.work_came()
        self._answers.append(answer)
        if order is OperatorOrder.RESUME:
            self.rested()

    def rested(self) -> bool:
        """Answer finished orders; return whether there were any."""
        answers, self._answers = self._answers, []
        for answer in answers:
            answer(None)
        return bool(answers)

    def _frozen_turn(self) -> Turn:
        """Observe the steps in flight, and launch none; without any, answer and wait for the bell."""
        loop = self._loop
        settled = loop.drain()  # the watchdog watches until they have ended
        loop.frozen = True
        if not (self.rested() or settled) and loop.bell.wait(WAIT_SECONDS):
            loop.bell.clear()
        return Turn([], settled, [])
