"""Where the news of a stream goes: to the sink that its opener gave, or to the task that reads it."""

import asyncio

import numpy as np
import pytest
from by_hand import A, ByHand
from fronts import FRONT, core

from gapless.base.params import SamplingParams
from gapless.base.records import Flag, StepTokens
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.thread_backend import ThreadBackend


def opened(n=1):
    return ByHand(n, takes=True)


async def reader_of(one):
    task = asyncio.create_task(one.stream.next())
    await asyncio.sleep(0)
    return task


async def test_news_that_the_sink_takes_wakes_no_reader():
    one = opened()
    task = await reader_of(one)
    for _ in range(3):
        one.say()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [delta.text for delta in one.seen] == ["a"] * 3 and not task.done()
    one.answer = False
    one.say()
    (delta,) = await asyncio.wait_for(task, 60)
    assert delta.text == "a" and delta.token_ids == [A]


async def test_news_that_a_sink_leaves_is_for_the_reader_whole():
    one = opened(3)
    task = await reader_of(one)
    one.answer = False
    one.say(keys=(1, 2, 3))
    deltas = await asyncio.wait_for(task, 60)
    assert len(one.seen) == 1 and [delta.index for delta in deltas] == [0, 1, 2]


async def test_every_completion_is_offered():
    one = opened(3)
    task = await reader_of(one)
    one.say(keys=(3, 1))
    assert [(delta.index, delta.text) for delta in one.seen] == [(2, "a"), (0, "a")] and not task.done()
    one.say(Flag.STOP, keys=(1,))  # others go on
    assert one.seen[-1].finish_reason == "stop" and not task.done()
    one.say(Flag.STOP, keys=(2, 3))
    deltas = await asyncio.wait_for(task, 60)
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(1, "stop"), (2, "stop")]


async def test_a_fault_of_the_sink_ends_its_request_alone():
    one = opened()
    one.answer = ZeroDivisionError("its own")
    task = await reader_of(one)
    one.say()  # raises nothing: the tracker goes on with the others
    with pytest.raises(ZeroDivisionError, match="its own"):
        await asyncio.wait_for(task, 60)
    assert one.stream.finished and not one.tracker.requests
    assert one.aborted == [1]


@pytest.mark.parametrize("flag", [Flag.STOP, Flag.LENGTH, Flag.ERROR])
async def test_the_end_is_for_the_reader(flag):
    one = opened()
    task = await reader_of(one)
    one.say(flag)
    (delta,) = await asyncio.wait_for(task, 60)
    assert len(one.seen) == 0 and delta.finish_reason is not None and one.stream.finished


async def test_news_is_not_offered_while_no_reader_waits():
    """The task writes, or has not begun: what it has in hand must come first."""
    one = opened()
    one.say()
    assert len(one.seen) == 0
    (delta,) = await one.stream.next()
    one.say()
    assert len(one.seen) == 0 and delta.text == "a"


async def test_news_after_the_reader_was_called_is_for_it():
    one = opened()
    task = await reader_of(one)
    one.answer = False
    one.say()
    one.answer = True
    one.say()
    (delta,) = await asyncio.wait_for(task, 60)
    assert len(one.seen) == 1 and delta.text == "aa"


async def test_a_reader_that_was_cancelled_waits_no_more():
    one = opened()
    task = await reader_of(one)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    one.say()
    assert len(one.seen) == 0


async def test_a_sink_and_its_reader_get_every_token_once():
    """Over a real engine: what the sink leaves and what it takes are the whole text, in order."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    async with AsyncLLM(ThreadBackend(core), FRONT) as llm:
        *_, whole = [output async for output in llm.generate("abc", params.replace(seed=1))]

        class Sometimes:
            def __init__(self):
                self.offered = 0

            def put(self, delta):
                self.offered += 1
                taken = self.offered % 3 > 0
                if taken:
                    tokens.extend(delta.token_ids)
                return taken

        tokens, sink = [], Sometimes()
        stream = await llm.open("abc", params.replace(seed=1), sink=sink)
        while not stream.finished:
            for delta in await stream.next():
                tokens += delta.token_ids
        assert tokens == whole.outputs[0].token_ids and len(tokens) == 60 and sink.offered


async def test_steps_that_come_together_are_offered_once():
    """A front that lags writes what waits for a stream in one event."""
    one = opened()
    task = await reader_of(one)
    column = np.zeros(1, np.int32)
    step = StepTokens(1, np.array([1]), np.full_like(column, A), column)
    one.tracker.on_tokens(step, step, step)
    (delta,) = one.seen
    assert delta.text == "aaa" and delta.token_ids == [A] * 3 and not task.done()
    one.tracker.on_tokens(step, step._replace(flags=column + Flag.STOP))
    (delta,) = await asyncio.wait_for(task, 60)
    assert len(one.seen) == 1 and delta.token_ids == [A] * 2 and delta.finish_reason == "stop"
