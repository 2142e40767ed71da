"""Who gets the news of a stream: its task, or the short way that it offered."""

import asyncio

import numpy as np
import pytest
from fronts import TOKENIZER

from gapless.base.params import SamplingParams
from gapless.base.records import Flag, Request, StepTokens
from gapless.engine.async_llm import Stream
from gapless.engine.inputs import Resolved
from gapless.engine.tracker import Tracker

A = TOKENIZER.token_id("a")


class Opened:
    """One request of one completion, to which tokens come by hand."""

    def __init__(self):
        self.aborted = []
        self.tracker = Tracker(TOKENIZER, self.aborted.append)
        tokens, params = np.array([A], np.int32), SamplingParams(max_tokens=9)
        resolved = Resolved(None, tokens, params, [Request(1, tokens, params, 0, (), 0, 10)])
        news = asyncio.Event()
        self.stream = Stream(self.tracker.open("r", resolved, news.set), news, self.tracker)
        self.offered, self.answer = 0, True
        self.stream.at_once = self.at_once

    def at_once(self):
        self.offered += 1
        if self.answer:
            self.stream.take()
        return self.answer

    def say(self, flag=0):
        column = np.array([flag], np.int32)
        self.tracker.on_tokens(StepTokens(1, np.array([1]), np.full_like(column, A), column))


async def test_news_that_was_taken_at_once_wakes_nobody():
    one = Opened()
    task = asyncio.create_task(one.stream.next())
    await asyncio.sleep(0)
    for _ in range(3):
        one.say()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert one.offered == 3 and not task.done()
    one.answer = False
    one.say()
    (delta,) = await asyncio.wait_for(task, 5)
    assert delta.text == "a"


@pytest.mark.parametrize("flag", [Flag.LIVE, Flag.STOP])
async def test_a_fault_in_the_short_way_ends_its_request_alone(flag):
    one = Opened()

    def broken():
        one.stream.take()
        raise ZeroDivisionError("its own")

    one.stream.at_once = broken
    task = asyncio.create_task(one.stream.next())
    await asyncio.sleep(0)
    one.say(flag)  # raises nothing: whoever hands out tokens goes on with the others
    with pytest.raises(ZeroDivisionError, match="its own"):
        await asyncio.wait_for(task, 5)
    assert one.stream.finished and not one.tracker.requests
    assert one.aborted == ([1] if flag == Flag.LIVE else [])


async def test_nothing_is_offered_while_nobody_waits():
    """The task writes, or has not begun: what it has in hand must come first."""
    one = Opened()
    one.say()
    assert one.offered == 0
    (delta,) = await one.stream.next()
    one.say()
    assert one.offered == 0 and delta.text == "a"


async def test_once_the_task_is_called_all_that_follows_is_for_it():
    one = Opened()
    task = asyncio.create_task(one.stream.next())
    await asyncio.sleep(0)
    one.answer = False
    one.say()
    one.answer = True
    one.say()
    (delta,) = await asyncio.wait_for(task, 5)
    assert one.offered == 1 and delta.text == "aa"


async def test_a_task_that_was_cancelled_waits_no_more():
    one = Opened()
    task = asyncio.create_task(one.stream.next())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    one.say()
    assert one.offered == 0
