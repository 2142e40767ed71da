"""The ring of orders and the board: nothing is lost, torn or reordered, and a dead process blocks no other."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import deque
from pathlib import Path

import pytest
import shared_ranks
from shared_ranks import alone, frame, process, shared
from waiting import until

from gapless.comm.shared import MOST_FRAME, Commons


def test_every_reader_takes_all_orders_in_order() -> None:
    with shared(3) as (leader, *readers):
        for number in range(50):
            leader.ring.put(frame(number))
        for reader in readers:
            assert [reader.ring.take() for _ in range(50)] == [frame(number) for number in range(50)]
            assert reader.ring.take() is None and not reader.ring.wait(0.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_full_ring_refuses_and_gives_room_as_its_slowest_reader_takes(seed: int) -> None:
    """Against a queue of bytes; an empty ring has room for any order."""
    rng = random.Random(seed)
    with shared(3) as (leader, *readers):
        waiting: list[deque[bytes]] = [deque(), deque()]
        full = 0
        for _ in range(3000):
            length = rng.choice((0, 1, 8, 100, rng.randrange(5000), rng.randrange(MOST_FRAME + 1)))
            if leader.ring.room(length):
                order = rng.randbytes(8) * (length // 8) + bytes(length % 8)
                leader.ring.put(order)
                for some in waiting:
                    some.append(order)
            else:
                full += 1
                assert any(waiting)
            for reader, some in zip(readers, waiting, strict=True):
                for _ in range(rng.choice((0, 0, 1, 3))):
                    assert reader.ring.take() == (some.popleft() if some else None)
        assert full
        for reader, some in zip(readers, waiting, strict=True):
            while some:
                assert reader.ring.take() == some.popleft()
        assert leader.ring.room(MOST_FRAME) and not leader.ring.room(MOST_FRAME + 1)


def test_an_order_without_room_is_refused_and_leaves_the_others() -> None:
    with shared(2) as (leader, reader):
        put = 0
        while leader.ring.room(1 << 18):
            leader.ring.put(bytes([put]) * (1 << 18))
            put += 1
        assert put == 15
        with pytest.raises(AssertionError, match="no room"):
            leader.ring.put(bytes(1 << 18))
        assert [reader.ring.take()[:1] for _ in range(put)] == [bytes([one]) for one in range(put)]


def test_a_wait_for_an_order_keeps_no_lock_of_the_interpreter() -> None:
    with shared(2) as (leader, reader):
        waits = threading.Thread(target=reader.ring.wait, args=(600.0,))
        waits.start()
        leader.ring.put(b"order")  # needs the lock
        waits.join(60)
        assert not waits.is_alive() and reader.ring.take() == b"order"


def test_a_wait_ends_after_its_time_and_at_a_stop() -> None:
    with shared(2) as (leader, reader):
        begin = time.monotonic()
        assert not reader.ring.wait(0.01) and time.monotonic() - begin >= 0.01
        waits = threading.Thread(target=reader.ring.wait, args=(600.0,))
        waits.start()
        leader.group.stop()
        waits.join(60)
        assert not waits.is_alive() and reader.stopped and not reader.ring.wait(600.0)
        leader.ring.put(b"last")
        assert reader.ring.wait(600.0) and reader.ring.take() == b"last"


@pytest.mark.process
def test_100_000_orders_arrive_whole_in_another_process() -> None:
    with alone(3) as leader, process(shared_ranks.reads, leader, 1, 3), process(shared_ranks.reads, leader, 2, 3):
        for number in range(100_000):
            order = frame(number)
            if not leader.ring.room(len(order)):
                until(lambda order=order: leader.ring.room(len(order)))
            leader.ring.put(order)
        until(lambda: [leader.board.line(rank).taken for rank in (1, 2)] == [100_000] * 2)


@pytest.mark.process
@pytest.mark.parametrize("program", [shared_ranks.kills_writers, shared_ranks.kills_readers])
def test_a_process_that_is_killed_leaves_whole_orders(program: object) -> None:
    with alone(2) as leader, process(program, leader, 1, 2) as peer:  # type: ignore[arg-type]
        assert peer.stdout.readline() == "all True\n"


# The board.


def test_each_rank_writes_its_line_of_the_board_and_all_read_it() -> None:
    with shared(3) as ranks:
        for one in ranks:
            rank = one.share.rank
            one.board.taken(10 + rank)
            one.board.launched(20 + rank)
            one.board.ended(30 + rank)
            one.board.enter(40 + rank)
        for rank in range(3):
            line = ranks[(rank + 1) % 3].board.line(rank)
            assert line[1:] == (10 + rank, 20 + rank, 30 + rank, 40 + rank, 0, 0, 0)


def test_a_pulse_goes_without_the_interpreter_and_ends_with_its_rank() -> None:
    with shared(2) as (leader, other):
        until(lambda: leader.board.line(1).pulse > 0)
        before = leader.board.line(1).pulse
        assert abs(before - time.monotonic_ns()) < 60e9
        until(lambda: leader.board.line(1).pulse > before)
        other.close()
        last = leader.board.line(1).pulse
        before = leader.board.line(0).pulse
        until(lambda: leader.board.line(0).pulse > before)
        assert leader.board.line(1).pulse == last


def test_a_memory_is_given_back_when_its_ranks_close() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("gapless-ranks")

    before = mapped()
    made = Commons.create(2)
    assert mapped() > before
    made.close()
    del made
    gc.collect()
    assert mapped() == before
