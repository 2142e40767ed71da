"""Host threads: what orders them, and what does not."""

from __future__ import annotations

import abc
import asyncio
import collections
import copy
import multiprocessing
import os
import pickle
import queue
import socket
import sys
import threading
import time
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from gapless.device import CpuDevice
from gapless.guard import threads
from gapless.guard.race import no_race

CLOSED_LATER: list[Callable[[], None]] = []
"""What ends the channels of a test."""

RealQueue = queue.SimpleQueue
"""Taken before any checker is on, so it orders a run for certain and the checker does not see how."""


@pytest.fixture(autouse=True)
def channels_closed():
    yield
    while CLOSED_LATER:
        CLOSED_LATER.pop()()


class Pair:
    """Two threads that write the same tensor; `hand_over` and `receive` may order them."""

    def __init__(self) -> None:
        self.memory = torch.zeros(4)

    def run(self, hand_over, receive) -> list:
        with no_race("record") as checker:
            checker.register("memory", self.memory)
            first = threading.Thread(target=self.first, args=(hand_over,), name="first")
            second = threading.Thread(target=self.second, args=(receive,), name="second")
            for thread in (first, second):
                thread.start()
            for thread in (first, second):
                thread.join()
            self.memory.sum()
        return checker.races

    def first(self, hand_over) -> None:
        self.memory.fill_(1.0)
        hand_over()

    def second(self, receive) -> None:
        receive()
        self.memory.fill_(2.0)


def test_two_threads_without_an_order_are_reported():
    unseen = RealQueue()
    (race,) = Pair().run(lambda: unseen.put(1), unseen.get)
    assert {race.first.agent, race.second.agent} == {"thread first", "thread second"}
    assert "no join, queue, event or lock orders the two" in race.missing


def condition_pair():
    ready, condition = [], threading.Condition()

    def hand_over() -> None:
        with condition:
            ready.append(1)
            condition.notify()

    def receive() -> None:
        with condition:
            condition.wait_for(lambda: ready)

    return hand_over, receive


def lock_pair(make):
    unseen, lock = RealQueue(), make()

    def hand_over() -> None:
        with lock:
            pass
        unseen.put(1)

    def receive() -> None:
        unseen.get()
        with lock:
            pass

    return hand_over, receive


def event_pair():
    event = threading.Event()
    return event.set, event.wait


def queue_pair(make):
    made = make()
    return lambda: made.put(1), made.get


def semaphore_pair():
    made = threading.Semaphore(0)
    return made.release, made.acquire


def pipe_pair():
    """Pipes, pairs of sockets and connections exist in both processes of a fork, and here in one."""
    reads, writes = os.pipe()
    CLOSED_LATER.extend([partial(os.close, reads), partial(os.close, writes)])
    return lambda: os.write(writes, b"x"), lambda: os.read(reads, 1)


def sockets_pair():
    one, other = socket.socketpair()
    CLOSED_LATER.extend([one.close, other.close])
    return lambda: one.sendall(b"x"), lambda: other.recv(1)


def connections_pair():
    one, other = multiprocessing.Pipe()
    CLOSED_LATER.extend([one.close, other.close])
    return lambda: one.send(1), other.recv


def loop_pair(make):
    loop = make()
    CLOSED_LATER.append(loop.close)
    done = loop.create_future()
    return lambda: loop.call_soon_threadsafe(done.set_result, 1), lambda: loop.run_until_complete(done)


def coroutine_pair():
    """The coroutine runs on the loop's thread."""
    loop = asyncio.new_event_loop()
    CLOSED_LATER.append(loop.close)
    stop = loop.create_future()

    async def finish() -> None:
        stop.set_result(1)

    return lambda: asyncio.run_coroutine_threadsafe(finish(), loop), lambda: loop.run_until_complete(stop)


def deque_pair():
    made = collections.deque()

    def receive() -> None:
        while not made:
            time.sleep(0.001)
        made.popleft()

    return lambda: made.append(1), receive


def zmq_pair():
    zmq = pytest.importorskip("zmq")
    one, other = (zmq.Context.instance().socket(zmq.PAIR) for _ in range(2))
    name = f"inproc://{id(one)}"
    CLOSED_LATER.extend([one.close, other.close])
    one.bind(name)
    other.connect(name)
    return lambda: one.send_multipart([b"x", b"y"]), other.recv_multipart


PAIRS = {
    "coroutine": coroutine_pair,
    "asyncio's loop": lambda: loop_pair(asyncio.new_event_loop),
    "event": event_pair,
    "condition": condition_pair,
    "queue": lambda: queue_pair(queue.Queue),
    "priority queue": lambda: queue_pair(queue.PriorityQueue),
    "semaphore": semaphore_pair,
}
ONLY_IF_MADE_INSIDE = {
    "simple queue": lambda: queue_pair(queue.SimpleQueue),
    "lock": lambda: lock_pair(threading.Lock),
    "recursive lock": lambda: lock_pair(threading.RLock),
    "deque": deque_pair,
    "pipe": pipe_pair,
    "sockets": sockets_pair,
    "connections": connections_pair,
    "zmq's inproc": zmq_pair,
    "uvloop": lambda: loop_pair(pytest.importorskip("uvloop").new_event_loop),
}


@pytest.mark.parametrize("name", [*PAIRS, *ONLY_IF_MADE_INSIDE])
def test_two_threads_in_order_are_not_reported(name):
    if name in PAIRS:  # also if they were made before
        assert Pair().run(*PAIRS[name]()) == []
    pair = Pair()
    with no_race("record"):
        assert pair.run(*{**PAIRS, **ONLY_IF_MADE_INSIDE}[name]()) == []


def test_start_and_join_order_a_thread_with_its_maker():
    memory = torch.zeros(4)
    with no_race("record") as checker:
        checker.register("memory", memory)
        memory.fill_(1.0)
        thread = threading.Thread(target=memory.fill_, args=(2.0,))
        thread.start()
        thread.join()
        memory.fill_(3.0)
    assert checker.races == []


@pytest.mark.parametrize("options, races", [({}, 1), ({"threads": "one"}, 0)])
def test_a_thread_that_is_not_joined_races_with_its_maker_unless_all_are_one(options, races):
    memory, wrote = torch.zeros(4), RealQueue()
    with no_race("record", **options) as checker:
        checker.register("memory", memory)
        thread = threading.Thread(target=lambda: [memory.fill_(2.0), wrote.put(1)])
        thread.start()
        wrote.get()
        memory.fill_(3.0)
        thread.join()
    assert len(checker.races) == races


def test_a_pools_results_are_ordered():
    memory = torch.zeros(4)
    with no_race("record") as checker:
        checker.register("memory", memory)
        with ThreadPoolExecutor(2) as pool:
            for _ in range(5):
                memory.fill_(1.0)
                pool.submit(memory.fill_, 2.0).result()
    assert checker.races == []


def test_an_order_that_is_not_seen_can_be_stated():
    memory, unseen, baton = torch.zeros(4), RealQueue(), torch.nn.Identity()
    with no_race() as checker:
        checker.register("memory", memory)

        def work() -> None:
            memory.fill_(2.0)
            checker.happens_before(baton)
            unseen.put(1)

        thread = threading.Thread(target=work)
        thread.start()
        unseen.get()
        checker.happens_after(baton)
        memory.fill_(3.0)
        thread.join()


def test_a_fence_seen_by_one_thread_orders_another_only_through_it():
    device, memory, unseen = CpuDevice(threads=1), torch.zeros(4), RealQueue()
    with no_race("record") as checker:
        checker.register("memory", memory)
        device.compute.launch(memory.fill_, 1.0)
        fence = device.compute.record()

        def look() -> None:
            fence.wait()
            memory.sum()
            unseen.put(1)

        thread = threading.Thread(target=look)
        thread.start()
        unseen.get()
        assert checker.races == []
        memory.sum()
        assert len(checker.races) == 1
        thread.join()
        device.close()


def test_a_closed_device_has_nothing_in_flight():
    device, memory = CpuDevice(threads=1), torch.zeros(4)
    with no_race() as checker:
        checker.register("memory", memory)
        device.compute.launch(memory.fill_, 1.0)
        device.compute.record()
        device.close()
        memory.fill_(2.0)


def test_a_thread_from_before_is_adopted_with_its_name():
    # It is seen on a device's stream and by what it states; its operators are not, as it had no mode when it began.
    memory, work, done = torch.zeros(4), RealQueue(), RealQueue()
    thread = threading.Thread(target=lambda: [work.get()(), done.put(1)], name="old")
    thread.start()
    with no_race("record") as checker:
        checker.register("memory", memory)
        memory.fill_(1.0)
        work.put(lambda: checker.access("memory", "write"))
        done.get()
    thread.join()
    (race,) = checker.races
    assert race.second.agent == "thread old"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_failed_was_joined_all_the_same():
    memory = torch.zeros(4)

    def fail() -> None:
        memory.fill_(1.0)
        raise KeyError("its own")

    with no_race("record") as checker:
        checker.register("memory", memory)
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        memory.sum()
    assert checker.races == []


def test_all_that_wants_new_threads_shares_one_wrap():
    entered = []

    def around(name: str):
        @contextmanager
        def inside(thread: threading.Thread):
            entered.append(name)
            yield

        return inside

    plain = threading.Thread.start
    with ExitStack() as outer:
        outer.enter_context(threads.starting_inside(around("outer")))
        wrapped = threading.Thread.start
        with threads.starting_inside(around("inner")):
            assert threading.Thread.start is wrapped is not plain
            thread = threading.Thread(target=lambda: entered.append("run"))
            thread.start()
            thread.join()
            outer.close()  # the first to come may be the first to go
    assert entered == ["outer", "inner", "run"] and threading.Thread.start is plain


def test_a_polled_list_orders_nothing():
    rows: list[int] = []

    def receive() -> None:
        while not rows:
            time.sleep(0.001)

    assert len(Pair().run(lambda: rows.append(1), receive)) == 1


@pytest.mark.parametrize("end", [pytest.param("made", id="made inside"), pytest.param("real", id="made before")])
def test_a_deque_is_copied_and_pickled_inside_as_outside(end):
    real = collections.deque([1, 2], maxlen=3)
    with no_race():
        one = collections.deque([1, 2], maxlen=3) if end == "made" else real
        assert isinstance(one, collections.deque) and issubclass(type(one), collections.deque)
        assert {type(real): 1}[collections.deque] == 1
        inside = [pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)]
    for made in (*inside, pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert made == real and made.maxlen == 3 and isinstance(made, collections.deque)
    assert pickle.dumps(one, 4) == pickle.dumps(real, 4)


def test_a_class_may_be_a_deque_and_have_attributes():
    with no_race():

        class Recent(collections.deque, abc.ABC):
            pass

        recent = Recent([1])
        recent.note = "seen"
        twin = copy.deepcopy(recent)
        assert not isinstance(collections.deque(), Recent) and isinstance(recent, collections.deque)
    assert twin == recent and vars(twin) == {"note": "seen"}
    with pytest.raises(TypeError, match="unhashable"):
        hash(recent)


def test_locks_and_simple_queues_stay_classes_for_annotations_and_checks():
    before = [threading.Lock(), threading.RLock(), queue.SimpleQueue()]
    with no_race("record"):
        kinds = [threading.Lock, threading.RLock, queue.SimpleQueue]
        for kind, old in zip(kinds, before, strict=True):
            made = kind()
            assert [one for one in kinds if isinstance(made, one)] == [kind]
            assert isinstance(old, kind) and isinstance(made, type(old)) and issubclass(type(made), kind)
            assert {type(old): 1}[kind] == 1 and kind is not type(old)
            assert type(None) in typing.get_args(kind | None)
            for copies in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot pickle"):
                    copies(made)
        assert typing.get_args(queue.SimpleQueue[int]) == (int,)

        class Sized(queue.SimpleQueue, abc.ABC):
            def __init__(self, most: int) -> None:
                self.most = most

        assert isinstance(Sized(3), queue.SimpleQueue) and not isinstance(queue.SimpleQueue(), Sized)
    assert before[2].__class__ is queue.SimpleQueue


def test_a_descriptor_that_was_a_pipes_orders_nothing_as_another_files():
    unseen = RealQueue()
    with no_race("record"):
        for end in os.pipe():
            os.close(end)
        source, drain = os.open("/dev/zero", os.O_RDONLY), os.open("/dev/null", os.O_WRONLY)
        CLOSED_LATER.extend([partial(os.close, source), partial(os.close, drain)])
        races = Pair().run(
            lambda: unseen.put(os.write(drain, b"log")), lambda: os.read(source, unseen.get()),
        )  # fmt: skip
    assert len(races) == 1


def test_after_a_region_hand_overs_are_as_before():
    owners = (collections, asyncio.BaseEventLoop, asyncio.AbstractEventLoop, os, socket, socket.socket)
    before = [dict(vars(owner)) for owner in owners], list(sys.meta_path)
    with no_race():
        assert collections.deque is not before[0][0]["deque"]
    assert ([dict(vars(owner)) for owner in owners], list(sys.meta_path)) == before
