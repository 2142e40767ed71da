"""One driver over both ports: what goes in, what comes out, and what ends its waits."""

import asyncio
import contextlib
import socket
import threading
import time

import numpy as np
import pytest
from page_router import Router
from scripted_port import ScriptedPort

from gapless.base.errors import DeviceError, EngineDeadError, QueueFullError, RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import Flag, Request, Turn
from gapless.engine import driver
from gapless.engine import messages as m
from gapless.engine.driver import EngineDriver
from gapless.engine.ports import QueuePort, WirePort
from gapless.engine.wire import Wire
from gapless.memory.events import PageEvents
from gapless.memory.index import PrefixIndex
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher
from gapless.testing.core import FakeCore, next_token


class ThreadFront:
    """The other end of a QueuePort: an asyncio loop on a thread."""

    def __init__(self):
        self.seen = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = QueuePort(self._loop, self.seen.extend)

    def post(self, message):
        self.port.post(message)

    def leave(self):
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def close(self):
        """The loop is all that it holds."""


class WireFront:
    """The other end of a WirePort."""

    def __init__(self):
        self.seen = []
        ours, theirs = socket.socketpair()
        self.port, self._wire, self._left = WirePort(Wire(theirs)), Wire(ours), False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        while not self._left:
            for frame in self._wire.receive():
                self.seen.extend(m.decode_from_core(frame))
            time.sleep(0.001)

    def post(self, message):
        self._wire.send(m.encode([message]))

    def leave(self):
        self._left = True
        self._thread.join()
        self._wire.close()

    def close(self):
        self.port.close()


class Running:
    """A driver on a thread, and its front."""

    def __init__(self, front, core):
        self.front, self.core, self.error = front, core, None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            EngineDriver(self.core, self.front.port).run()
        except Exception as error:
            self.error = error

    def post(self, *messages):
        for message in messages:
            self.front.post(message)

    def until(self, truth, seconds=60.0):
        end = time.monotonic() + seconds
        while not (found := [one for one in list(self.front.seen) if truth(one)]):
            assert time.monotonic() < end, self.front.seen
            time.sleep(0.001)
        return found[0]

    def close(self):
        if self._thread.is_alive():
            self.post(m.Stop())
        assert self.ended()
        self.front.leave()
        self.front.close()

    def ended(self, seconds=60.0):
        self._thread.join(seconds)
        return not self._thread.is_alive()


@pytest.fixture(params=[ThreadFront, WireFront], ids=["queue", "wire"])
def drive(request):
    with contextlib.ExitStack() as stack:

        def start(core):
            front = request.param()
            running = Running(front, core)
            stack.callback(running.close)
            return running

        yield start


def add(key, length=3, max_len=None, **params):
    tokens = np.array([3, 4], np.int32)
    return m.pack_request(Request(key, tokens, SamplingParams(**params), 0, (), 0, max_len or 2 + length))


def kinds(seen):
    return [type(one).__name__ for one in seen if not isinstance(one, m.StatsReport)]


def test_a_request_is_admitted_before_its_tokens_come(drive):
    running = drive(FakeCore())
    running.post(add(1))
    running.until(lambda one: isinstance(one, m.Tokens) and one.settled.flags[0] == Flag.LENGTH)
    seen = running.front.seen
    assert kinds(seen) == ["Ready", "Admitted", "Tokens", "Tokens", "Tokens"]
    assert seen[0] == m.Ready(running.core.info) and m.Admitted(1, 0) in seen
    sent = [int(one.settled.tokens[0]) for one in seen if isinstance(one, m.Tokens)]
    assert sent == [next_token(m.unpack_request(add(1)), count, 100) for count in range(3)]
    report = running.until(lambda one: isinstance(one, m.StatsReport) and one.stats.steps.generation_tokens == 3)
    assert report.stats.queue.running == 0, "the numbers come at once when the last request has gone"


def test_a_refusal_of_the_core_names_its_request(drive):
    running = drive(FakeCore(max_queue=0))
    running.post(add(1, max_len=10**6), add(2))
    refused = [running.until(lambda one, key=key: isinstance(one, m.Refused) and one.key == key) for key in (1, 2)]
    assert [type(one.error) for one in refused] == [QueueFullError] * 2
    running = drive(FakeCore())
    running.post(add(7, max_len=10**6))
    error = running.until(lambda one: isinstance(one, m.Refused)).error
    assert type(error) is RequestError and error.param == "max_tokens"


def test_steps_go_out_while_watched_and_a_look_is_answered(drive):
    running = drive(FakeCore())
    running.post(m.SetWatching(True), add(1, length=30))
    seen = []
    while len(seen) < 30:
        shown = running.until(lambda one: isinstance(one, m.Steps))
        running.front.seen.remove(shown)
        seen += [record.step for record in m.unpack_steps(shown)]
    assert seen == list(range(1, 31))
    running.post(m.SetWatching(False), add(2), m.Look(5, 0))
    view = running.until(lambda one: isinstance(one, m.View))
    assert view.number == 5 and len(m.unpack_steps(view.steps)) >= 30
    assert "Steps" not in kinds(running.front.seen)


def test_an_abort_ends_a_request(drive):
    running = drive(Slow(0.002))
    running.post(add(1, length=10_000))
    running.until(lambda one: isinstance(one, m.Tokens))
    running.post(m.Abort(1))
    running.until(lambda one: isinstance(one, m.StatsReport) and one.stats.steps.steps and not one.stats.queue.running)
    assert running.core.aborted == [1]


class Slow(FakeCore):
    def __init__(self, seconds):
        super().__init__(max_model_len=100_000)
        self._seconds = seconds

    def step(self):
        time.sleep(self._seconds)
        return super().step()


@pytest.mark.parametrize("busy", [False, True])
def test_a_driver_that_is_stopped_ends_without_an_error(drive, busy):
    running = drive(Slow(0.002))
    if busy:
        running.post(add(1, length=10_000))
        running.until(lambda one: isinstance(one, m.Tokens))
    running.post(m.Stop())
    assert running.ended() and running.error is None
    assert not running.core.closed, "that is for its owner to do"


@pytest.mark.parametrize("busy", [False, True])
def test_a_front_that_is_gone_ends_it(drive, busy, monkeypatch):
    monkeypatch.setattr(driver, "REPORT_IDLE", 0.05)
    running = drive(Slow(0.002))
    running.until(lambda one: isinstance(one, m.Ready))
    if busy:
        running.post(add(1, length=50_000))
        running.until(lambda one: isinstance(one, m.Tokens))
    running.front.leave()
    assert running.ended() and running.error is None


@pytest.mark.parametrize("fault", [DeviceError("step 2 failed on purpose"), EngineDeadError("gone")])
def test_a_fault_of_the_core_comes_out_and_tokens_before_it_are_sent(drive, fault):
    class Failing(FakeCore):
        def submit(self, request):
            if isinstance(fault, EngineDeadError):
                raise fault
            super().submit(request)

    running = drive(Failing(fail_at_step=2))
    running.post(add(1))
    assert running.ended() and str(running.error) == str(fault)
    if isinstance(fault, DeviceError):
        running.until(lambda one: isinstance(one, m.Tokens))


class Sleeper(FakeCore):
    """Its steps wait for a device that never answers, until the bell is rung."""

    def __init__(self):
        super().__init__()
        self.bell = self
        self.woken = threading.Event()
        self.inside = threading.Event()

    def ring(self):
        self.woken.set()

    def step(self):
        self.inside.set()
        assert self.woken.wait(60), "the bell never rang"
        self.woken.clear()
        self.inside.clear()
        return Turn([], [], [])


def test_a_message_ends_the_wait_inside_a_step(drive):
    running = drive(Sleeper())
    core = running.core
    running.post(add(1))
    for key in range(50):
        assert core.inside.wait(60)
        running.post(m.Look(key, 0))
        running.until(lambda one, key=key: isinstance(one, m.View) and one.number == key)
    running.post(m.Stop())
    assert running.ended()


class Preparing(FakeCore):
    """Finds three things to prepare, one whenever it is at rest."""

    def __init__(self):
        super().__init__()
        self.prepared, self.rests, self._due = 0, 0, False

    def rest(self):
        assert not self.has_work()
        self.rests += 1
        self._due = self.prepared < 3
        return self._due

    def has_work(self):
        return self._due or super().has_work()

    def step(self):
        if not self._due:
            return super().step()
        self._due, self.prepared = False, self.prepared + 1
        return Turn([], [], [])


class Woken(FakeCore):
    """A core to which something comes by itself."""

    def __init__(self):
        super().__init__()
        self.news, self.taken = threading.Event(), threading.Event()

    def wakes(self, wake):
        self.wake = wake

    def has_work(self):
        return self.news.is_set() or super().has_work()

    def step(self):
        if self.news.is_set():
            self.news.clear()
            self.taken.set()
            return Turn([], [], [])
        return super().step()


def test_news_of_a_tier_ends_the_wait_of_a_core_at_rest(drive, monkeypatch):
    monkeypatch.setattr(driver, "REPORT_IDLE", 1e6)
    core = Woken()
    running = drive(core)
    running.until(lambda one: isinstance(one, m.Ready))
    for _ in range(3):  # it may wait by now; if not, the next wait ends at once
        core.news.set()
        core.wake()
        assert core.taken.wait(60.0), "the news was taken in at the next report alone"
        core.taken.clear()


def test_a_message_goes_before_the_preparations_of_a_core_at_rest():
    core, port = Preparing(), ScriptedPort([add(1, length=8)])
    turns = EngineDriver(core, port)
    turns.turn()
    assert core.has_work() and core.rests == core.prepared == 0, "the message was there"
    while core.has_work():
        turns.turn()
    assert not any(port.waits)
    for prepared in (1, 2, 3):
        turns.turn()
        assert core.prepared == prepared and [wait for wait in port.waits if wait] == [driver.REST_SECONDS]
    turns.turn()
    assert core.prepared == 3 and port.waits[-2:] == [0.0, driver.REPORT_IDLE]


def test_a_core_prepares_nothing_between_two_requests():
    core, port = Preparing(), ScriptedPort([add(1, length=8)])
    turns = EngineDriver(core, port)
    for key in (2, 3):
        turns.turn()
        while core.has_work():
            turns.turn()
        port.messages += [[], [add(key, length=8)]]  # while it waits to see whether it is at rest
    turns.turn()
    assert core.has_work() and core.rests == core.prepared == 0


def filled(page, pool, index, length=8):
    """Page `page` and the one after it are written, observed, and given up."""
    tokens = np.full(length, page, np.int32)
    pages = [pool.take() for _ in range(length // pool.page_size)]
    index.publish(index.chain(tokens, ""), tokens, [pages], 0, len(pages), 0)
    pool.retire(pages, 0)


def test_page_events_wait_in_the_core_while_the_front_does_not_read():
    ledger = Ledger()
    pool = PagePool(5, 4, ledger)
    index = PrefixIndex(PrefixHasher("m", 4), [pool])
    core, port = FakeCore(), ScriptedPort([m.SendPageEvents()])
    core.events = index.events = PageEvents([pool])
    turns, router = EngineDriver(core, port), Router(index.hasher)
    turns.turn()
    port.clear = False
    for number in range(1_000):
        filled(number, pool, index)
        turns.turn()
    assert not any(isinstance(one, m.PageEventList) for one in port.sent)
    port.clear = True
    turns.turn()
    turns.turn()
    (message,) = [one for one in port.sent if isinstance(one, m.PageEventList)]
    assert len(message.events) < 4
    router.apply(message.events)
    assert router.known() == {*pool.digest_of.values()} and len(router.known()) == 4


@pytest.mark.parametrize("front", [ThreadFront, WireFront])
def test_a_port_is_clear_again_when_the_front_has_read(front):
    made = front()
    for _ in range(200):
        made.port.send([m.Refused(1, RequestError("x" * 1_000))])
    end = time.monotonic() + 60
    while not (made.port.clear and len(made.seen) == 200):
        made.port.send([])
        assert time.monotonic() < end
    made.leave()
    made.close()


def test_a_port_whose_front_does_not_read_is_not_clear():
    loop = asyncio.new_event_loop()
    thread, (ours, theirs) = QueuePort(loop, print), socket.socketpair()
    wire = WirePort(Wire(ours))
    for port in (thread, wire):
        assert port.clear
        for _ in range(1_000):
            port.send([m.Refused(1, RequestError("x" * 1_000))])
        assert not port.clear
    loop.close()
    wire.close()
    theirs.close()
