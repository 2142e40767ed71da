"""The waiting queue: order, the limit, and aborts in the middle."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gapless.base.errors import QueueFullError
from gapless.plan.queue import WaitingQueue
from gapless.plan.row import Row, RowSpec, State


def waiting_row(order, priority=0, leases=()):
    return Row(RowSpec(order, 1, 8, priority, order, leases=leases), np.zeros(1, np.int32))


def leave(queue, row):
    row.state = State.DONE
    queue.remove(row)


@pytest.mark.parametrize("by_priority", [False, True])
def test_order_is_that_of_a_sorted_list_through_adds_pops_and_aborts(by_priority):
    rng, queue, waiting = random.Random(1), WaitingQueue(10_000, by_priority), []
    for order in range(2_000):
        draw = rng.random()
        if draw < 0.5:
            row = waiting_row(order, rng.randrange(-3, 3))
            queue.add(row)
            waiting.append(row)
        elif draw < 0.7 and waiting:
            leave(queue, waiting.pop(rng.randrange(len(waiting))))
        elif draw < 0.9:
            waiting.sort(key=lambda row: (row.asked.priority if by_priority else 0, row.asked.order))
            assert queue.pop() is (waiting.pop(0) if waiting else None)
        elif waiting:
            row = queue.pop()
            queue.put_back(row)
        assert len(queue) == len(waiting)


def test_the_limit_is_for_new_ones_only():
    queue = WaitingQueue(2, False)
    first, second = waiting_row(0), waiting_row(1)
    queue.add(first)
    queue.add(second)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        queue.add(waiting_row(2))
    queue.put_back(waiting_row(3))
    assert len(queue) == 3
    for _ in range(2):
        queue.pop()
    queue.add(waiting_row(4))


def test_aborted_ones_are_let_go_of():
    queue = WaitingQueue(10_000, False)
    every = [waiting_row(order) for order in range(5_000)]
    for row in every:
        queue.add(row)
    for row in every[1:]:
        leave(queue, row)
        assert len(queue.heap) <= 2 * len(queue) + 64 + 1
    assert queue.pop() is every[0] and queue.pop() is None


@pytest.mark.parametrize("ask", [WaitingQueue.ready, WaitingQueue.unpark])
def test_a_slot_leased_by_departed_requests_is_asked_for_no_more(ask):
    """An adapter may be gone when the last request for it has left."""
    queue, kept, gone = WaitingQueue(10, False), waiting_row(0, leases=("kept",)), waiting_row(1, leases=("gone",))
    for row in (kept, gone):
        queue.add(row)
    for _ in range(2):
        queue.park(queue.pop())
    leave(queue, gone)
    asked = []
    ask(queue, lambda leases: bool(asked.append(leases)))
    assert asked == [("kept",)]
    queue.unpark(lambda leases: True)
    assert queue.pop() is kept and queue.pop() is None
