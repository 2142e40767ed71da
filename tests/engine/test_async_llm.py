"""AsyncLLM on a thread backend, over a core without a model."""

import asyncio
import threading
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from fronts import EOS, FRONT, TOKENIZER, core, says
from vocabularies import byte_fallback

from gapless.base.errors import EngineDeadError, QueueFullError, RequestError
from gapless.base.params import SamplingParams as Params
from gapless.engine.async_llm import INLINE_CHARS, AsyncLLM
from gapless.engine.frontdoor import ModelAssets
from gapless.engine.outputs import Delta
from gapless.engine.thread_backend import ThreadBackend
from gapless.testing.core import FakeCore, next_token


def running(fake: FakeCore) -> AsyncLLM:
    return AsyncLLM(ThreadBackend(lambda: fake), FRONT, seed=0)


class Gated(FakeCore):
    """Takes a step only when the test lets it."""

    def __init__(self, **options) -> None:
        super().__init__(TOKENIZER.vocab_size, **options)
        self.gate = threading.Semaphore(0)
        self.inside = False

    def step(self):
        self.inside = True
        assert self.gate.acquire(timeout=30)
        self.inside = False
        return super().step()

    def allow(self, steps: int = 1) -> None:
        self.gate.release(steps)


@asynccontextmanager
async def gated(**options):
    """Such a core, whose tokens are all the same, and the engine over it."""
    fake = Gated(script=lambda request, count: 5, **options)
    async with running(fake) as llm:
        yield fake, llm


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def joined(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


async def test_generate_gives_growing_outputs():
    async with running(says("hello 你")) as llm:
        outputs = [output async for output in llm.generate("a", Params(max_tokens=50))]
    texts = [output.outputs[0].text for output in outputs]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    last = outputs[-1]
    assert texts[-1] == "hello 你"
    assert last.finished and [o.finished for o in outputs[:-1]] == [False] * (len(outputs) - 1)
    assert (last.outputs[0].finish_reason, last.outputs[0].token_ids[-1]) == ("stop", EOS)
    assert last.metrics.generation_tokens == len(last.outputs[0].token_ids)
    assert last.metrics.arrival <= last.metrics.started <= last.metrics.first_token <= last.metrics.last_token
    assert last.metrics.time_to_first_token >= last.metrics.queue_seconds >= 0.0
    assert last.num_cached_tokens == 0 and last.prompt == "a"


async def test_a_slow_reader_gets_merged_deltas():
    async with gated() as (fake, llm):
        stream = await llm.open([1], Params(max_tokens=40))
        fake.allow(40)
        await until(lambda: not llm.open_requests)
        deltas = await stream.next()
        assert len(deltas) == 1 and len(deltas[0].token_ids) == 40
        assert deltas[0].finish_reason == "length" and stream.finished
        stream.close()
        assert fake.aborted == []


async def test_closing_the_iterator_aborts():
    async with gated() as (fake, llm):
        deltas = llm.stream([1], Params(max_tokens=500))
        fake.allow(3)
        assert (await anext(deltas)).token_ids
        await deltas.aclose()
        assert llm.open_requests == 0
        fake.allow(5)
        await until(lambda: len(fake.aborted) == 1)


async def test_cancelling_the_reader_aborts_every_completion():
    async with gated() as (fake, llm):

        async def read() -> None:
            async for _ in llm.generate([1], Params(n=3, max_tokens=500)):
                pass

        task = asyncio.create_task(read())
        await until(lambda: llm.open_requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.open_requests == 0
        fake.allow(5)
        await until(lambda: len(fake.aborted) == 3)


async def test_abort_by_id_ends_the_stream_with_that_reason():
    async with gated() as (fake, llm):
        stream = await llm.open([1], Params(n=2, max_tokens=500), "mine")
        await llm.abort(["mine", "unknown"])
        assert [delta.finish_reason for delta in await stream.next()] == ["abort", "abort"]
        assert stream.finished
        fake.allow(5)
        await until(lambda: len(fake.aborted) == 2)


async def test_an_abort_gives_out_the_held_text_and_ends_once():
    # The open character is settled by the abort, and completes the stop string.
    tokenizer = byte_fallback()
    ids = [tokenizer.token_id(t) for t in ("<0xF0>", "<0x9F>", "<0x91>")]
    fake = Gated(max_model_len=300, script=lambda request, count: ids[count] if count < 3 else 5)
    async with AsyncLLM(ThreadBackend(lambda: fake), ModelAssets(tokenizer)) as llm:
        stream = await llm.open([5], Params(max_tokens=200, stop="��"), "mine")
        fake.allow(3)
        deltas = []
        while sum(len(delta.token_ids) for delta in deltas) < 3:
            deltas += await stream.next()
        assert joined(deltas) == ""
        await llm.abort("mine")
        assert [(d.text, d.finish_reason, d.stop_reason) for d in await stream.next()] == [("", "stop", "��")]
        assert stream.finished and llm.open_requests == 0
        fake.allow(9)
        await until(lambda: fake.aborted)


async def test_a_start_that_is_cancelled_ends_the_thread():
    go = threading.Event()
    fake = core()

    def build():
        assert go.wait(timeout=30)
        return fake

    llm = AsyncLLM(ThreadBackend(build), FRONT)
    starting = asyncio.create_task(llm.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go.set()
    await llm.close()
    assert fake.closed


async def test_a_name_that_a_client_took_is_not_given():
    async with gated() as (fake, llm):
        streams = [await llm.open([1], Params(max_tokens=1), name) for name in ("request-1", None, None)]
        assert [stream.request_id for stream in streams] == ["request-1", "request-2", "request-3"]
        fake.allow(9)
        await asyncio.gather(*map(read_all, streams))


async def test_a_request_id_that_is_open_is_refused():
    async with gated() as (fake, llm):
        first = await llm.open([1], Params(), "same")
        with pytest.raises(RequestError) as caught:
            await llm.open([1], Params(), "same")
        assert (caught.value.param, caught.value.code) == ("request_id", "duplicate_request_id")
        first.close()
        second = await llm.open([2], Params(max_tokens=1), "same")
        fake.allow(5)
        assert (await second.next())[0].finish_reason == "length"


async def test_two_long_prompts_with_one_id_are_refused_after_tokenising():
    prompt = "a " * INLINE_CHARS
    fake = Gated(max_model_len=100_000)
    async with running(fake) as llm:
        given = await asyncio.gather(
            llm.open(prompt, Params(), "same"), llm.open(prompt, Params(), "same"), return_exceptions=True
        )
        assert sorted(type(one).__name__ for one in given) == ["OutputStream", "RequestError"]
        fake.allow(50)


async def blocked(fake: Gated) -> None:
    """Wait until the core is inside a step, so that what is submitted now is read at once after it."""
    await until(lambda: fake.inside)


async def test_a_refused_request_raises_from_its_iterator():
    async with gated(max_queue=1, max_num_seqs=1) as (fake, llm):
        streams = [await llm.open([1], Params(max_tokens=2))]
        await blocked(fake)
        streams += [await llm.open([1], Params(max_tokens=2)) for _ in range(2)]
        fake.allow(20)
        ends = await asyncio.gather(*map(read_all, streams), return_exceptions=True)
        assert [type(end) for end in ends] == [list, list, QueueFullError]
        assert llm.open_requests == 0


async def test_one_refused_completion_ends_its_request():
    async with gated(max_queue=2, max_num_seqs=1) as (fake, llm):
        first = await llm.open([1], Params(max_tokens=1))
        await blocked(fake)
        many = await llm.open([1], Params(n=8, max_tokens=2))
        fake.allow(20)
        with pytest.raises(QueueFullError):
            await read_all(many)
        assert len(await read_all(first)) == 1
        await until(lambda: len(fake.aborted) == 7 and not llm.stats().queue.running)


async def read_all(stream) -> list[Delta]:
    deltas = []
    while not stream.finished:
        deltas += await stream.next()
    return deltas


async def test_a_dead_engine_ends_every_stream():
    async with running(core(fail_at_step=4, script=lambda request, count: 5)) as llm:
        params = Params(max_tokens=500)
        streams = [await llm.open([1 + i], params) for i in range(5)]
        ends = await asyncio.gather(*map(read_all, streams), return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDeadError] * 5
        assert len({id(end) for end in ends}) == 5
        assert "step 4 failed on purpose" in str(ends[0])
        assert not llm.is_ready
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await anext(llm.generate([1], params))


async def test_a_fault_in_delivering_ends_every_stream(monkeypatch, caplog):
    async with running(core()) as llm:
        stream = await llm.open([1], Params(max_tokens=500))
        monkeypatch.setattr(stream.completions[0].__class__, "push", lambda *_: 1 // 0)
        with pytest.raises(EngineDeadError, match="by zero"):
            await read_all(stream)
        assert not llm.is_ready and "could not be delivered" in caplog.text


async def test_tokens_before_the_death_are_read_first():
    async with gated(fail_at_step=4) as (fake, llm):
        stream = await llm.open([1], Params(max_tokens=500))
        fake.allow(4)
        await until(lambda: not llm.is_ready)
        assert len((await stream.next())[0].token_ids) == 3
        with pytest.raises(EngineDeadError):
            await stream.next()
        assert stream.finished


async def test_64_streams_at_once_get_all_tokens():
    async with running(core(max_num_seqs=16, lag=2)) as llm:

        async def one(i: int) -> None:
            params = Params(seed=i, max_tokens=1 + i % 23, ignore_eos=True, n=1 + i % 2)
            deltas = [delta async for delta in llm.stream([1 + i, 2], params)]
            assert sorted(delta.index for delta in deltas if delta.finish_reason) == [*range(params.n)]
            for index, request in enumerate(llm.resolver.resolve([1 + i, 2], params).requests):
                tokens = [token for delta in deltas if delta.index == index for token in delta.token_ids]
                assert tokens == [next_token(request, c, TOKENIZER.vocab_size) for c in range(params.max_tokens)]

        await asyncio.gather(*(one(i) for i in range(64)))
        assert llm.open_requests == 0
        await until(lambda: llm.stats().queue.running == llm.stats().queue.waiting == 0)


async def test_drain_waits_for_open_requests_and_takes_no_new_ones():
    async with gated() as (fake, llm):
        stream = await llm.open([1], Params(max_tokens=3))
        assert await llm.drain(0.01) is False
        assert not llm.is_ready
        with pytest.raises(QueueFullError, match="draining"):
            await llm.open([1], Params())
        waiting = asyncio.create_task(llm.drain(30))
        fake.allow(3)
        assert await waiting is True
        assert len((await stream.next())[0].token_ids) == 3


async def test_drain_ends_when_the_last_reader_leaves():
    async with gated() as (fake, llm):
        stream = await llm.open([1], Params(max_tokens=3))
        waiting = asyncio.create_task(llm.drain(30))
        await asyncio.sleep(0)
        stream.close()
        assert await waiting is True
        fake.allow(5)


async def test_close_ends_open_requests_with_an_error():
    fake = Gated(script=lambda request, count: 5)
    llm = running(fake)
    await llm.start()
    await llm.check_health()
    stream = await llm.open([1], Params())
    fake.allow(30)
    await llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await read_all(stream)
    assert fake.closed and not llm.is_ready
    with pytest.raises(EngineDeadError, match="closed"):
        await llm.open([1], Params())


async def test_a_core_that_cannot_be_built_raises_from_start():
    def build():
        raise RequestError("no such thing", "model")

    with pytest.raises(RequestError, match="no such thing"):
        async with AsyncLLM(ThreadBackend(build), FRONT):
            pytest.fail("started")


async def test_an_engine_that_is_not_started_says_so():
    llm = running(core())
    with pytest.raises(EngineDeadError, match="not started"):
        await llm.chat_prompt([{"role": "user", "content": "hello"}])
    await llm.close()


async def test_chat_prompt_and_encode_run_on_threads():
    async with running(says("hi")) as llm:
        prompt = await llm.chat_prompt([{"role": "user", "content": "hello"}])
        assert prompt["prompt"] == "<|user|>hello\n<|a|>"
        assert prompt["prompt_token_ids"] == await llm.encode(prompt["prompt"])
        deltas = [delta async for delta in llm.stream(prompt)]
        assert joined(deltas) == "hi"
        assert llm.get_tokenizer() is llm.tokenizer and llm.get_default_sampling_params() == Params()
        assert llm.info.vocab_size == TOKENIZER.vocab_size


def test_a_loop_that_went_away_ends_the_engine_thread():
    fake = Gated(script=lambda request, count: 5)
    llm = running(fake)

    async def leave() -> None:
        await llm.start()
        await llm.open([1], Params(max_tokens=500))

    asyncio.run(leave())
    fake.allow(3)
    llm.backend.thread.join(timeout=30)
    assert not llm.backend.thread.is_alive() and fake.closed


async def test_the_first_requests_start_an_engine_that_was_not_started():
    llm = running(core())

    async def ask(prompt):
        return [output async for output in llm.generate(prompt, Params(max_tokens=3))][-1]

    try:
        first, second = await asyncio.gather(ask([1, 2]), ask([3]))
    finally:
        await llm.close()
    assert first.finished and second.finished
