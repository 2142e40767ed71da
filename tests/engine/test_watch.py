"""Looking at a running engine: nothing is sent without a watcher, and a slow watcher costs nothing."""

import asyncio
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from fronts import FRONT, TOKENIZER, core
from scripted_port import ScriptedPort

from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError
from gapless.base.params import SamplingParams as Params
from gapless.base.records import CAUSES, Turn
from gapless.engine import messages as m
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.backend import MessageBackend
from gapless.engine.driver import EngineDriver
from gapless.engine.process_backend import ProcessBackend
from gapless.engine.stats import Stats
from gapless.engine.thread_backend import ThreadBackend
from gapless.engine.trace import KEPT_REQUESTS
from gapless.engine.watch import LOG_STEPS, StepWatcher
from gapless.loop.records import COLUMNS, StepCounts, StepRecord, StepTable
from gapless.loop.timeline import DeviceTimes, StepSizes
from gapless.offload.lower import LowerCounts
from gapless.plan.queue import QueueCounts
from gapless.testing.core import FakeCore


def steps(*numbers):
    zeros = dict.fromkeys(COLUMNS, 0)
    records = [StepRecord(**(zeros | {"step": step}), decode=np.empty(0, np.int64), chunks=()) for step in numbers]
    return StepTable.of(records)


class Said(MessageBackend):
    """A backend that notes what it is asked."""

    def __init__(self):
        super().__init__()
        self.sink = None
        self.calls = []

    def _post(self, message):
        self.calls.append(message)
        return True


def test_the_first_watcher_turns_it_on_and_the_last_one_off():
    backend = Said()
    watch = StepWatcher(backend)
    watch.on_steps(steps(1))
    assert not watch.log.table(0) and watch.log.ended == 0, "what comes late is of no use to anybody"
    with watch.open():
        with watch.open():
            watch.on_steps(steps(2))
        assert backend.calls == [m.SetWatching(True)]
        assert [r.step for r in watch.log.table(0)] == [2]
    assert backend.calls == [m.SetWatching(True), m.SetWatching(False)]
    assert not watch.log.table(0)


def test_a_slow_reader_gets_the_newest_and_the_count_it_missed():
    watch = StepWatcher(Said())
    with watch.open():
        for start in range(0, LOG_STEPS * 2, 64):
            watch.on_steps(steps(*range(start, start + 64)))
        assert len(watch.log.table(0)) == LOG_STEPS, "the log is bounded"
        new, skipped = watch.after(0, 10)
        assert [r.step for r in new] == list(range(LOG_STEPS * 2 - 10, LOG_STEPS * 2))
        assert skipped == LOG_STEPS * 2 - 10
        new, skipped = watch.after(watch.log.ended, 10)
        assert not new and skipped == 0
        new, skipped = watch.after(watch.log.ended - 3, 10)
        assert len(new) == 3 and skipped == 0


async def test_a_look_gets_the_answer_with_its_number():
    backend = Said()
    watch = StepWatcher(backend)
    first, second = asyncio.create_task(watch.look(5)), asyncio.create_task(watch.look(6))
    await asyncio.sleep(0)
    assert backend.calls == [m.Look(1, 5), m.Look(2, 6)]
    nothing = m.pack_steps(steps())
    backend.receive([m.View(2, nothing, b"f"), m.View(99, nothing, b"x")])
    assert (await second).pages == b"f" and not first.done()
    backend.forsake(lambda: EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await first
    assert not backend.asked


async def test_an_engine_that_does_not_answer_is_no_endless_wait(monkeypatch):
    monkeypatch.setattr("gapless.engine.watch.VIEW_SECONDS", 0.01)
    backend = Said()
    watch = StepWatcher(backend)
    with pytest.raises(EngineDeadError, match="did not answer a status request"):
        await watch.look(0)
    assert not backend.asked


class Written(FakeCore):
    """A core whose steps are those that the test writes, busy until the test says otherwise."""

    busy = True

    def has_work(self):
        return self.busy

    def step(self):
        return Turn([], [], [])


def test_watchers_see_the_steps_to_come_alone(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("gapless.engine.driver.time", SimpleNamespace(monotonic=lambda: now[0]))
    core, port = Written(), ScriptedPort()
    core.records.extend(steps(1, 2))
    driver = EngineDriver(core, port)

    def turns(*messages):
        port.messages, port.sent = [[*messages]], []
        driver.turn()
        driver.turn()  # the messages of a turn go out with the next one
        return [record.step for one in port.sent if isinstance(one, m.Steps) for record in m.unpack_steps(one)]

    assert turns() == turns(m.SetWatching(True)) == []
    core.records.extend(steps(3))
    assert turns() == [], "not before its time"
    now[0] += 1
    assert turns() == [3]
    core.records.extend(steps(4))
    core.busy = False
    assert turns() == [4], "all of them, where the engine comes to rest"
    now[0] += 1
    turns(m.SetWatching(False))
    core.records.extend(steps(5))
    assert turns() == []


async def collect(llm, steps):
    async with asyncio.timeout(60):
        while not llm.watch.log.table(0) or llm.watch.log.table(0)[-1].step < steps:
            await asyncio.sleep(0.005)


async def watched(llm):
    """A request before, while and after a client watches."""
    params = Params(max_tokens=30, ignore_eos=True)
    async for _ in llm.generate("abc", params):
        pass
    assert not llm.watch.log.table(0)
    with llm.watch.open():
        async for _ in llm.generate("abc", params):
            pass
        await collect(llm, 60)
        seen = llm.watch.log.table(0)
        assert [r.step for r in seen] == list(range(31, 61)), "from the first step after the start, all of them"
        (key,) = llm.latest_requests(1)[0].keys
        assert seen[-1].decode.tolist() == [key]
    async for _ in llm.generate("abc", params):
        pass
    assert llm.watch.log.ended == 30, "without a watcher nothing comes"
    view = await llm.watch.look(seen[-1].committed_at + 1)
    assert [r.step for r in view.steps] == list(range(61, 91))


async def test_a_core_on_a_thread_can_be_watched():
    async with AsyncLLM(ThreadBackend(core), FRONT) as llm:
        await watched(llm)


@pytest.mark.process
async def test_a_core_in_another_process_and_its_successor_can_be_watched():
    backend = ProcessBackend(EngineConfig(), worker=("gapless.testing.worker", str(TOKENIZER.vocab_size), "0.0005"))
    async with AsyncLLM(backend, FRONT) as llm:
        await watched(llm)
        with llm.watch.open():
            os.kill(backend.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while not backend.last_death or not backend.ready():
                    await asyncio.sleep(0.01)
            async for _ in llm.generate("abc", Params(max_tokens=5, ignore_eos=True)):
                pass
            await collect(llm, 5)
            assert [r.step for r in llm.watch.log.table(0)] == [1, 2, 3, 4, 5]


async def test_the_latest_requests_are_bounded_and_hold_no_text():
    async with AsyncLLM(ThreadBackend(core), FRONT) as llm:
        params = Params(max_tokens=1)
        for _ in range(0, KEPT_REQUESTS + 20, 65):
            streams = [await llm.open("ab", params) for _ in range(65)]
            while any([not s.finished and await s.next() for s in streams]):
                pass
        stream = await llm.open("abc", Params(max_tokens=900, n=2))
        records = llm.latest_requests(10**6)
        assert len(records) == KEPT_REQUESTS
        assert [r.arrival for r in records] == sorted(r.arrival for r in records)
        last, before = records[-1], records[-2]
        assert (last.state, last.finish_reason, len(last.keys), last.prompt_tokens) in {
            ("waiting", None, 2, 3),
            ("running", None, 2, 3),
        }
        assert (before.state, before.finish_reason, before.generation_tokens) == ("done", "length", 1)
        assert before.arrival <= before.started <= before.first_token <= before.last_token
        stream.close()
        assert llm.latest_requests(1)[0].finish_reason == "abort"
        assert llm.latest_requests(3)[-2].id == before.id


def test_counters_go_on_across_restarts_and_gauges_do_not():
    before = Stats(
        queue=QueueCounts(running=3, depth=2), steps=StepCounts(steps=10), device=DeviceTimes(busy_ns=5),
        sizes=StepSizes(by_tokens=(1, 2)), lower=(LowerCounts(hits=2, waiting=5), LowerCounts(hits=1)),
    )  # fmt: skip
    now = Stats(
        queue=QueueCounts(running=1, depth=4), steps=StepCounts(steps=1), device=DeviceTimes(busy_ns=1),
        sizes=StepSizes(by_tokens=(0, 0, 7)), lower=(LowerCounts(hits=4, waiting=1),),
    ).plus(Stats().plus(before))  # fmt: skip
    assert now.queue == QueueCounts(running=1, depth=4) and (now.steps.steps, now.device.busy_ns) == (11, 6)
    assert now.sizes.by_tokens == (1, 2, 7)
    assert now.lower == (LowerCounts(hits=6, waiting=1), LowerCounts(hits=1))
    assert set(now.device.idle_ns) == set(CAUSES)
