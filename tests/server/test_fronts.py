"""Further fronts beside the first: what is whose, in how many frames, and what the first counts and asks."""

import asyncio
import socket

import numpy as np
import pytest
from server_harness import write_model
from test_metrics_page import INFO, counted, filled

from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError
from gapless.base.records import StepLogprobs, StepTokens
from gapless.engine import messages as m
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.frontdoor import locate
from gapless.engine.trace import RequestRecord
from gapless.engine.wire import Wire
from gapless.server import links
from gapless.server.config import ServerConfig
from gapless.server.fronts import KEY_BITS, MAX_SILENT, Fronts, FrontSettings, by_front
from gapless.server.further import FurtherServing
from gapless.server.links import FrontLink
from gapless.server.metrics import Metrics
from gapless.server.run import UvicornServer

FRONTS = 3


def key(front, own):
    return (front << KEY_BITS) + own


def step(keys, width=1, scored=()):
    """A step with a line for each key, and log-probabilities of the (key, position) of `scored`."""
    keys = np.array(keys, np.int64)
    tokens = np.arange(100, 100 + width * len(keys), dtype=np.int32).reshape(-1, width)
    logprobs = None
    if scored:
        of, at = (np.array(column) for column in zip(*scored, strict=True))
        own = np.arange(len(of), dtype=np.float32)
        tops = np.arange(2 * len(of)).reshape(-1, 2)
        logprobs = StepLogprobs(
            of.astype(np.int64), at.astype(np.int32), -own, own.astype(np.int32), tops.astype(np.int32),
            -tops.astype(np.float32),
        )  # fmt: skip
    return StepTokens(7, keys, tokens[:, 0] if width == 1 else tokens, np.arange(len(keys), dtype=np.int32), logprobs)


def lines(step):
    """Every number of a step by the key that it belongs to."""
    found = [(row[0], [np.array(column).tolist() for column in row]) for row in zip(*step[1:4], strict=True)]
    if step.logprobs is not None:
        found += [(row[0], [np.array(column).tolist() for column in row]) for row in zip(*step.logprobs, strict=True)]
    return [(int(of), columns[1:]) for of, columns in found]


MIXED = [key(2, 1), 1, key(1, 1), key(2, 9), 3]
STEPS = {
    "own alone": step([1, 2, 3]),
    "mixed": step(MIXED),
    "several tokens a row": step(MIXED, width=3),
    "scores": step(MIXED, scored=[(key(2, 1), 4), (1, 5), (key(2, 1), 6)]),
    "scores of a prompt without a token": step([1], scored=[(key(1, 4), 1), (key(1, 4), 2)]),
    "none": step([]),
}


@pytest.mark.parametrize("whole", STEPS.values(), ids=STEPS)
def test_each_line_of_a_step_goes_to_its_front_with_its_own_key(whole):
    parts = by_front(whole)
    for front in range(FRONTS):
        expected = [(of - key(front, 0), columns) for of, columns in lines(whole) if of >> KEY_BITS == front]
        assert lines(parts.get(front, step([]))) == expected
    assert {part.step for part in parts.values()} == {7}
    for part in parts.values():
        assert m.decode_from_core(m.encode([m.Tokens(part)]))  # of shapes that may cross the boundary


class Engine:
    """A backend that notes what it is sent."""

    def __init__(self, error=None):
        self.error, self.taken = error, []
        self.info, self.last_death, self.given_up = INFO, None, False

    def ready(self):
        return self.error is None

    def offer(self, add):
        self.taken.append(add)
        return self.error

    def abort(self, key):
        self.taken.append(m.Abort(key))


class Rig:
    """A first front with further ones, whose ends are here."""

    def __init__(self, engine=None, fronts=FRONTS - 1):
        self.lost = []
        self.fronts = Fronts(self.lost.append)
        self.fronts.backend = self.engine = engine or Engine()
        self.metrics = self.fronts.metrics = Metrics("m")
        self.ends = {}
        for number in range(1, fronts + 1):
            ours, theirs = socket.socketpair()
            self.fronts.add(ours, number)
            self.ends[number] = Wire(theirs)

    def frames(self, number):
        return [links.decode_to_further(frame) for frame in self.ends[number].receive()]

    async def say(self, number, *messages):
        self.ends[number].send(m.encode(messages))
        for _ in range(3):
            await asyncio.sleep(0)


def running(test):
    """Run a test that takes a Rig on an event loop, and close it."""

    def run():
        async def main():
            rig = Rig()
            try:
                await test(rig)
            finally:
                await rig.fronts.close()
                for end in rig.ends.values():
                    end.close()

        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@running
async def test_a_delivery_costs_each_front_one_frame_whatever_the_steps_and_rows_in_it(rig):
    rows = [key(front, own) for own in range(1, 65) for front in range(FRONTS)]
    delivery = [
        m.Admitted(rows[1], 5),
        *[m.Tokens(step(rows)) for _ in range(4)],
        m.Refused(rows[2], EngineDeadError()),
    ]
    own = rig.fronts.passed_on(delivery)
    assert [type(message) for message in own] == 4 * [m.Tokens]
    assert all(message.settled.keys.tolist() == [*range(1, 65)] for message in own)
    (first,), (second,) = rig.frames(1), rig.frames(2)
    assert first[0] == m.Admitted(1, 5) and [type(message) for message in first[1:]] == 4 * [m.Tokens]
    assert [type(message) for message in second] == [*4 * [m.Tokens], m.Refused] and second[-1].key == 1


@running
async def test_messages_of_the_engine_itself_stay_with_the_first_front(rig):
    own = [m.Changed(1, ("sums",), None), m.PageEventList(())]
    assert rig.fronts.passed_on(own) == own
    assert rig.frames(1) == rig.frames(2) == []


def add(own):
    return m.Add(own, np.array([1, 2], np.int32), {}, 0, (), 0, 9, 0, "", ())


@running
async def test_requests_of_two_fronts_have_different_keys_in_the_engine(rig):
    for number in rig.ends:
        await rig.say(number, add(1), m.Abort(1))
    assert [message.key for message in rig.engine.taken] == [key(1, 1), key(1, 1), key(2, 1), key(2, 1)]


@running
async def test_a_request_that_the_engine_cannot_take_is_refused_under_its_fronts_key(rig):
    rig.engine.error = EngineDeadError("the engine is not running")
    await rig.say(2, add(5))
    ((refused,),) = rig.frames(2)
    assert refused.key == 5 and str(refused.error) == "the engine is not running" and not rig.frames(1)


@running
async def test_requests_sent_before_a_front_hears_of_a_death_are_left_to_be_sent_again(rig):
    rig.engine.error = rig.engine.last_death = EngineDeadError("killed")
    rig.fronts.engine_changed()
    await rig.say(1, add(5))
    rig.engine.error = None
    rig.fronts.engine_changed()
    await rig.say(1, add(6))
    assert not rig.engine.taken
    (down,), (ready,) = rig.frames(1)
    assert down == links.EngineDown("the engine died: killed", False) and ready == m.Ready(INFO)
    await rig.say(1, links.DownNoted(), add(5), add(6))
    assert [message.key for message in rig.engine.taken] == [key(1, 5), key(1, 6)]


RECORD = RequestRecord("cmpl-1", (1, 2), 5, 0, 0, 0, 3, 0, 0, "waiting", None)


@running
async def test_questions_are_answered_by_all_fronts_that_are_there(rig):
    asked = asyncio.ensure_future(rig.fronts.abort())
    records = asyncio.ensure_future(rig.fronts.latest(9))
    await asyncio.sleep(0)
    for number in rig.ends:
        await asyncio.sleep(0)
        (ends,), (shows,) = rig.frames(number)
        assert (ends.ids, shows.limit) == ((), 9)
        await rig.say(number, links.Aborted(ends.number, 3), links.RequestList(shows.number, (RECORD,)))
    assert await asked == 6
    assert [record.keys for record in await records] == [(key(1, 1), key(1, 2)), (key(2, 1), key(2, 2))]


@running
async def test_a_front_that_ends_leaves_no_question_open_and_is_told_as_lost(rig):
    asked = asyncio.ensure_future(rig.fronts.abort(("a",)))
    await asyncio.sleep(0)
    for number in rig.ends:
        rig.ends[number].close()
    assert await asked == 0
    assert len(rig.lost) == 2 and "front 1 of --api-server-count" in str(rig.lost[0])
    assert rig.fronts.all_ended.is_set()


@running
async def test_a_front_that_was_asked_to_end_is_not_lost(rig):
    rig.fronts.drain()
    assert rig.frames(1) == [[links.Drain()]]
    for number in rig.ends:
        rig.ends[number].close()
    await asyncio.sleep(0.01)
    assert not rig.lost and rig.fronts.all_ended.is_set()


class Hung:
    """A process that notes its kills."""

    pid, killed = 7, 0

    def kill(self):
        self.killed += 1

    async def wait(self):
        return self.killed


@running
async def test_a_front_is_killed_when_it_falls_silent_for_too_long(rig):
    silent, speaking, starting = hung = [Hung(), Hung(), Hung()]
    front, (ours, theirs) = rig.fronts.fronts, socket.socketpair()
    rig.fronts.add(ours, 3)
    rig.ends[3] = theirs
    for number, process in enumerate(hung, 1):
        front[number].process = process
    for number in (1, 2):
        await rig.say(number, links.Listening())
    for second in range(1, 3 * MAX_SILENT):
        assert silent.killed == (second > MAX_SILENT)
        rig.fronts.second()
        await rig.say(2, links.Counted(Metrics("m").take(), 0, 0))
    assert (silent.killed, speaking.killed, starting.killed) == (1, 0, 0)
    rig.ends[1].close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert "front 1 of --api-server-count" in str(rig.lost[0])
    rig.fronts.drain()
    for _ in range(2 * MAX_SILENT):
        rig.fronts.second()
    assert speaking.killed == 0


@running
async def test_counts_of_a_front_make_the_page_that_they_would_have_made_in_the_first(rig):
    further = filled()
    rig.metrics.kv_events = further.kv_events
    await rig.say(1, links.Counted(further.take(), 4, 5))
    await rig.say(2, links.Counted(further.take(), 1, 2))
    assert (rig.fronts.open, rig.fronts.detok_ns) == (5, 7)
    assert rig.metrics.render(counted(), INFO, True) == filled().render(counted(), INFO, True)
    assert not any(further.take().http) and not any(any(counts) for counts, _ in further.take().histograms)


def test_a_frame_that_is_no_message_ends_a_link():
    async def main():
        lost = asyncio.Event()
        ours, theirs = socket.socketpair()
        link = FrontLink(ours, links.decode_to_first, lambda messages: None, lost.set)
        link.begin()
        end = Wire(theirs)
        end.send(m.encode([m.Stop()]))  # known, but not from a further front
        await asyncio.wait_for(lost.wait(), 20)
        link.send(links.Drain())  # harmless
        assert end.receive() == [] and not end.open
        end.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("owner", "part"), [(UvicornServer, "main_loop"), (AsyncLLM, "start"), (FurtherServing, "_count")]
)
def test_a_further_front_ends_with_an_error_when_a_part_of_it_ends_unasked(tmp_path, monkeypatch, caplog, owner, part):
    async def end(*_):
        if owner is not UvicornServer:
            raise RuntimeError("a part is broken")

    monkeypatch.setattr(owner, part, end)
    engine = EngineConfig(str(write_model(tmp_path)))

    async def main():
        ours, theirs = socket.socketpair()
        with ours, socket.create_server(("127.0.0.1", 0)) as listener:
            settings = FrontSettings(1, engine, locate(engine), ServerConfig(port=0), "first.sock")
            return await asyncio.wait_for(FurtherServing(settings, theirs, listener).run(), 20)

    assert asyncio.run(main()) == 1
    assert "this front ends unasked" in caplog.text
    assert ("a part is broken" in caplog.text) == (owner is not UvicornServer)
