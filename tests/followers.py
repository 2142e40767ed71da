"""Executors on devices of their own that obey the leader's orders, each at its pace: their outboxes are equal."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gapless.base.shared import SharedMemory
from gapless.device import RingSlot
from gapless.kernels.tables import Tables
from gapless.loop.loop import Loop
from gapless.model.seam import Model
from gapless.step.executor import Executor
from gapless.step.orders import AnyOrder, CaptureOrder, Order
from gapless.step.outbox import Outbox
from gapless.step.program import RowOptions
from gapless.testing.sim import SimDevice


class Follower:
    """One executor of another device. It has the leader's sizes, and tables, pages and rings of its own."""

    def __init__(self, loop: Loop, device: SimDevice, model: Model, rng: random.Random) -> None:
        leader = loop.launcher.executor
        program, self.device, self._rng = leader.program, device, rng
        tables = Tables(*(table.clone() for table in program.tables))
        cache = model.new_cache(program.cache.pages, program.cache.page_size, device.torch_device)
        slots = len(program.adjustments.owners) - 1
        self._program = type(program)(model, tables, cache, program.kernels, program.outbox, RowOptions(slots))
        words, rings = leader.buffers.words.numel(), (len(leader.packets.slots), len(leader.outboxes.slots))
        self.executor = Executor(device, self._program, words, *rings, leader.buffers.loads.numel())
        self._release, self.executor.release = self.executor.release, self._keep  # type: ignore[method-assign]
        self.orders: deque[AnyOrder] = deque()
        self._flown: deque[tuple[RingSlot, Any]] = deque()
        self.outboxes: deque[Outbox] = deque()
        """What the leader read, in the order of its steps, and has not been compared yet"""
        self.compared = 0

    def turn(self) -> None:
        """Compare what has ended here; obey some of the orders that have come."""
        self._compare()
        while self.orders and self._rng.random() < 0.7 and self._obey():
            pass

    def drain(self) -> None:
        """Obey all orders, and compare everything."""
        while self.orders:
            if not self._obey():
                self._flown[0][1].wait()
            self._compare()
        for _, home in self._flown:
            home.wait()
        self._compare()
        assert not self.outboxes, "the leader read a step that its follower did not run"

    def check_state(self, loop: Loop) -> None:
        """At rest tables, KV, outboxes and graphs are those of the leader."""
        leader = loop.launcher.executor
        theirs = leader.program
        for name, ours, leaders in zip(Tables._fields, self._program.tables, theirs.tables, strict=True):
            # The null row takes the writes of rows that are inert.
            assert torch.equal(ours[1:], leaders[1:]), f"a follower's {name} is not the leader's"
        assert torch.equal(self._program.cache.data[1:], theirs.cache.data[1:]), "a follower's KV is not the leader's"
        assert torch.equal(self.executor.buffers.lines, leader.buffers.lines), "the last outboxes of all slots differ"
        assert self.executor.graphs.keys() == leader.graphs.keys(), "graphs are captured and dropped alike"

    def _obey(self) -> bool:
        order = self.orders[0]
        if isinstance(order, Order):
            if not self.executor.ready():
                return False
        elif self._flown:
            return False  # a capture runs its program, which publishes
        self.orders.popleft()
        if isinstance(order, CaptureOrder):
            self.executor.capture(order)
        else:
            self.executor.obey(order)
        return True

    def _keep(self, outbox: RingSlot, home: Any) -> None:
        self._flown.append((outbox, home))

    def _compare(self) -> None:
        while self._flown and self.outboxes and self._flown[0][1].done():
            outbox, home = self._flown.popleft()
            wanted = self.outboxes.popleft()
            found = self.executor.read(outbox, len(wanted.rows))
            same = found.step == wanted.step and all(map(np.array_equal, found[1:], wanted[1:]))
            assert same, f"step {wanted.step}: a follower's outbox {found} is not the leader's {wanted}"
            self._release(outbox, home)
            self.compared += 1


class Followers:
    """Gives every order to all who are in `followers` by then. Implements `Ranks`."""

    def __init__(self, followers: Iterable[Follower]) -> None:
        self._followers = followers

    def room(self, orders: int) -> int:
        return orders

    def send(self, order: AnyOrder) -> None:
        for follower in self._followers:
            follower.orders.append(order)

    def captured(self, order: CaptureOrder) -> list[bool]:
        return [True] * len(order.capture)  # their devices are simulated, and refuse what the leader's refuses

    def host_memory(self, nbytes: int) -> SharedMemory:
        raise AssertionError("whole copies have no host tier")

    def moved(self, stores: bool, number: int) -> None:
        raise AssertionError("whole copies have no host tier")

    def waited(self) -> list[int]:
        return [0]  # whole copies, which do not wait for each other

    def lags(self) -> list[int]:
        return [0, *(len(follower.orders) for follower in self._followers)]


def compare_with(loop: Loop, followers: Iterable[Follower]) -> None:
    """What the loop reads is what the followers' outboxes are compared with."""
    executor = loop.launcher.executor
    read = executor.read

    def read_for_all(outbox: RingSlot, samples: int) -> Outbox:
        found = read(outbox, samples)
        copy = Outbox(found.step, *(column.copy() for column in found[1:]))
        for follower in followers:
            follower.outboxes.append(copy)
        return found

    executor.read = read_for_all  # type: ignore[method-assign]
