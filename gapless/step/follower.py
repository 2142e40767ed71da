"""A rank that follows: it obeys its leader's orders, computes its share of every forward, and decides nothing.

It has no sampler, no lane, no drafter and no reader of its outbox. What depends on time is decided by the leader alone,
who broadcasts each row's new state on the device, at the start of the next forward that the row is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from gapless.base.records import MoveOrder
from gapless.device import Fence
from gapless.kernels.layout import LENGTH
from gapless.step.executor import Executor
from gapless.step.keys import ProgramKey, StepKey
from gapless.step.orders import AdapterOrder, AnyOrder, CaptureOrder, WeightsOrder
from gapless.step.program import NEWS, StepProgram, newest


class FollowerProgram(StepProgram):
    """The programs of a step that a following rank runs: its loads, and its share of the forward."""

    samples_here = False

    def own(self, key: StepKey) -> tuple[ProgramKey, ...]:
        return (key.forward,) if key.load is None else (key.load, key.forward)

    def fill(self, name: str, row: int, slot: int, wishes: Tensor) -> None:
        """Lanes are the leader's."""

    def tell(self, rows: Tensor) -> None:
        """Receive the leader's state of these rows, and write it to the tables."""
        state, places = self._news(rows)
        tables = self.tables
        news = self.group.tell(torch.cat((state, tables.history[rows[:, None], places]), dim=1))
        tables.state[:, :NEWS].index_copy_(0, rows, news[:, :NEWS])
        places = newest(news[:, LENGTH], self.width, tables.history.shape[1])
        tables.history.index_put_((rows[:, None], places), news[:, NEWS:])


class Follower:
    """Obeys orders with an executor, as fast as they come and its device takes them."""

    def __init__(
        self, executor: Executor, captured: Callable[[list[bool]], None],
        adapt: Callable[[AdapterOrder], None] | None = None, renew: Callable[[WeightsOrder], None] | None = None,
        move: Callable[[MoveOrder, Fence | None], None] | None = None,
    ) -> None:  # fmt: skip
        """`captured` is given which graphs of a CaptureOrder this rank has made; `adapt` obeys an AdapterOrder, and
        `renew` a WeightsOrder. `move` begins a transfer of pages after a fence, or at once."""
        self.executor, self._adapt, self._renew, self._move = executor, adapt, renew, move
        self.launched = 0
        """Steps enqueued so far"""
        self._captured = captured
        self._flown: deque[Fence] = deque()
        """Ends of the last steps, the oldest first"""

    @property
    def ended(self) -> int:
        """Steps that have ended."""
        return self.launched - sum([not fence.done() for fence in self._flown])

    def obey(self, order: AnyOrder) -> None:
        """Enqueue the order; waits for older steps while the rings are full. Raises DeviceError."""
        if isinstance(order, CaptureOrder):
            self._drain()
            self._captured(self.executor.capture(order))
            return
        if isinstance(order, MoveOrder):
            assert self._move is not None, "a rank without a host tier has no pages to move"
            self._move(order, self._end_of(order.after))
            return
        if isinstance(order, AdapterOrder):
            assert self._adapt is not None, "a model without adapters"
            self._adapt(order)
            return
        if isinstance(order, WeightsOrder):
            assert self._renew is not None, "a model that keeps its weights"
            if order.digest:
                self._drain()
            self._renew(order)
            return
        while not self.executor.ready():
            self._flown.popleft().wait()
        self._flown.append(self.executor.obey(order))
        self.launched += 1
        self.look()

    def _end_of(self, steps: int) -> Fence | None:
        """Return the end of the first `steps` steps; None if they have ended for certain."""
        place = steps - 1 - (self.launched - len(self._flown))
        return self._flown[place] if place >= 0 else None

    def look(self) -> None:
        """Forget steps that have ended, but the last. Raises DeviceError if the device has failed."""
        self.executor.device.fault.check()
        while len(self._flown) > 1 and self._flown[0].done():
            self._flown.popleft()

    def _drain(self) -> None:
        while self._flown:
            self._flown.popleft().wait()
