"""Pauses and an emptied prefix cache: requests wait, end or stop where they are, and lose no token."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from seen_engine import SeenEngine, whole

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.base.errors import QueueFullError, RequestError
from gapless.base.records import PageChange

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 512, "num_gpu_blocks_override": 80}
PROMPT = "The quick brown fox jumps over the lazy dog near the river bank. " * 10
SHORT = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


@pytest.fixture(scope="module")
def script():
    with LLM("demo", **OPTIONS, enforce_eager=True) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(script):
    return script.generate(PROMPT, LONG, use_tqdm=False)[0].outputs[0].token_ids


def engine_of(**options):
    return SeenEngine(**OPTIONS, **{"enforce_eager": True, **options})


async def turns(llm, count=3):
    """Let the engine take some turns: it answers a look at the end of one."""
    for _ in range(count):
        await llm.watch.look(0)


async def test_requests_that_are_kept_stop_and_go_on_with_the_tokens_of_an_unbroken_run(wanted):
    engine = engine_of(depth="4", enforce_eager=False)
    async with engine.llm as llm:
        streams, watched = [await llm.open(PROMPT, LONG) for _ in range(3)], []
        await streams[0].next()
        observe = engine.core.loop.observe

        def seen(launched):
            watched.append(engine.core.loop.wants_steps())
            return observe(launched)

        engine.core.loop.observe = seen
        await llm.pause_generation(mode="keep")
        assert all(watched), "the watchdog is to see a device that hangs before the pause has begun"
        with pytest.raises(RequestError, match="resume or abort"):
            await llm.update_weights("other")
        assert await llm.is_paused() and not engine.core.loop.in_flight and not engine.core.loop.wants_steps()
        steps = engine.core.loop.counters.steps
        late = await llm.open(PROMPT, SHORT)
        await turns(llm)
        assert engine.core.loop.counters.steps == steps and not late.has_news
        assert not any(stream.ended for stream in streams)
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert [(await whole(stream))[0].token_ids for stream in streams] == [wanted] * 3
        assert (await whole(late))[0].token_ids == wanted[:16]


@pytest.mark.seeds
async def test_requests_end_before_a_pause_that_waits_and_later_ones_after_it(wanted):
    engine = engine_of()
    async with engine.llm as llm:
        open_ones = [await llm.open(PROMPT, LONG) for _ in range(6)]  # more than there are rows
        pause = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        late = await llm.open(PROMPT, SHORT)
        assert [(await whole(stream))[0].token_ids for stream in open_ones] == [wanted] * 6
        await pause
        await turns(llm)
        assert not late.has_news and not engine.core.loop.requests
        await llm.resume_generation()
        output, cached = await whole(late)
        assert output.token_ids == wanted[:16] and cached == 0, "the pause has emptied the cache"


async def test_a_pause_that_aborts_ends_all_requests_and_holds_the_next_core_too():
    engine = engine_of()
    async with engine.llm as llm:
        streams = [await llm.open(PROMPT, LONG) for _ in range(6)]
        await llm.pause_generation()
        assert {(await whole(stream))[0].finish_reason for stream in streams} == {"abort"}
        held = await llm.open(PROMPT, SHORT)
        assert await llm.abort_all() == 1 and (await whole(held))[0].finish_reason == "abort"
        engine.core.pauses.waits = False  # as in one that has just started
        llm.backend.came_up()
        held = await llm.open(PROMPT, SHORT)
        await turns(llm)
        assert not held.has_news
        await llm.pause_generation(mode="keep")
        await llm.resume_generation()
        await llm.resume_generation()
        assert (await whole(held))[0].finish_reason == "length"
        with pytest.raises(RequestError, match="mode must be abort, wait, keep"):
            await llm.pause_generation(mode="stop")


@pytest.mark.seeds
async def test_an_emptied_cache_gives_no_page_and_takes_none_from_those_that_run(wanted, monkeypatch):
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**10)
    seen = []
    engine = engine_of(kv_tiers=["host:64MiB"])
    engine.llm.send_page_events(seen.extend)
    async with engine.llm as llm:
        assert (await whole(await llm.open(PROMPT, SHORT)))[1] == 0
        assert (await whole(await llm.open(PROMPT, SHORT)))[1] > 256
        running = await llm.open(PROMPT, LONG)
        await running.next()
        assert await llm.reset_prefix_cache()
        _, cached = await whole(await llm.open(PROMPT, SHORT))
        assert cached == 0 and llm.stats().tier.loaded == 0
        assert (await whole(running))[0].token_ids == wanted
        assert (await whole(await llm.open(PROMPT, SHORT)))[1] > 256, "pages that came since are shared"
        for pool in engine.core.loop.pools:
            pool.check([])
    assert [event.change for event in seen].count(PageChange.CLEARED) == 2


@pytest.mark.seeds
async def test_requests_with_forms_that_a_pause_holds_are_bounded_too():
    engine = engine_of()
    form = SamplingParams(max_tokens=4, structured_outputs={"choice": ["yes"]})
    async with engine.llm as llm:
        await llm.pause_generation()
        engine.core.loop.planner.waiting.limit = 2
        held = [await llm.open(PROMPT, form) for _ in range(2)]
        while llm.stats().queue.waiting < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError):
            await whole(await llm.open(PROMPT, form))
        await llm.resume_generation()
        assert [(await whole(stream))[0].text for stream in held] == ["yes"] * 2


def test_a_script_finds_no_page_once_it_has_emptied_the_cache(script):
    for first in (True, False):
        cached = [script.generate(PROMPT, SHORT, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
        assert first or cached[0] == 0
        assert cached[1] > 256
        assert script.reset_prefix_cache()


async def test_requests_of_an_engine_that_died_are_older_than_a_pause_and_than_new_weights(wanted):
    """They enter the loop, where new weights wait for them, also if their matchers are made meanwhile."""
    engine = engine_of()
    async with engine.llm as llm:
        stream = await llm.open(PROMPT, LONG)
        await stream.next()
        await llm.pause_generation(mode="keep")
        (request,) = engine.core.loop.requests.values()
        again = request._replace(key=request.key + 1_000, output=np.array(wanted[:3], np.int32))
        form = SamplingParams(temperature=0, max_tokens=9, structured_outputs=StructuredOutputs(regex="[ab]{9}"))
        late = again._replace(key=again.key + 1, params=form, matcher=None, output=np.zeros(0, np.int32))
        for one in (again, late):
            llm.backend.submit(one)
        with pytest.raises(RequestError, match="resume or abort"):
            await llm.update_weights("other")
        await turns(llm)
        while not {again.key, late.key} <= engine.core.loop.requests.keys():
            await turns(llm)
        for one in (again, late):
            llm.backend.abort(one.key)
        await llm.resume_generation()
        assert (await whole(stream))[0].token_ids == wanted
