"""Several engines behind one front: which one gets a request, what becomes of it when one dies, orders for all."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from fronts import FRONT, core, says
from mortal import MortalBackend

from gapless import SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, RequestError
from gapless.base.records import PageChange, PageEvent
from gapless.engine import messages as m
from gapless.engine.arguments import one_engine
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.fleet import Fleet, fleet_of
from gapless.engine.placing import Candidate, PageBook, choose
from gapless.engine.seam import AdapterChange, OperatorOrder
from gapless.engine.stats import Stats
from gapless.memory.prefix import PrefixHasher
from gapless.plan.queue import QueueCounts

TEXT = "a text of thirty-one letters..."


@pytest.mark.parametrize(
    ("engines", "turn", "wanted"),
    [
        ([(0, 0), (1, 0), (2, 0)], 0, 0),
        ([(0, 0), (1, 0), (2, 0)], 2, 2),
        ([(0, 0), (2, 0)], 1, 2),
        ([(0, 3), (1, 2), (2, 3)], 0, 1),
        ([(0, 3, 0.5), (1, 2), (2, 3)], 1, 0),
        ([(0, 4, 1.0), (1, 0)], 0, 1),
        ([(0, 3, 1.0), (1, 2)], 0, 0),
        ([(0, 1, 1.0), (1, 0, 0.5)], 0, 1),
        ([(0, 9, 1.0)], 5, 0),
        ([(0, 2, 0.5), (1, 2, 0.5)], 1, 1),
    ],
)
def test_the_choice_weighs_prefixes_against_load(engines, turn, wanted):
    assert choose([Candidate(*one) for one in engines], turn) == wanted


def test_equal_engines_are_taken_in_turn():
    loads, turn, chosen = [0, 0, 0], 0, []
    for _ in range(9):
        number = choose([Candidate(at, load) for at, load in enumerate(loads)], turn)
        loads[number], turn = loads[number] + 1, number + 1
        chosen.append(number)
    assert chosen == [0, 1, 2] * 3


def fleet(*dies_after):
    return Fleet([MortalBackend(says(TEXT), deaths) for deaths in dies_after])


async def text_of(llm, name, **options):
    stream = await llm.open("hi", SamplingParams(max_tokens=60, n=options.pop("n", 1)), name, **options)
    while not stream.finished:
        await stream.next()
    return [one.text for one in stream.snapshot().outputs], stream


async def test_requests_are_spread_and_loads_come_back_to_zero():
    engines = fleet((), ())
    async with AsyncLLM(engines, FRONT) as llm:
        found = await asyncio.gather(*[text_of(llm, f"r{number}") for number in range(8)])
        assert [texts for texts, _ in found] == [[TEXT]] * 8
        assert [engines.placed_by(number)["load"] for number in (0, 1)] == [4, 4]
        assert engines.loads == [0, 0]


async def test_completions_of_a_request_stay_together_and_a_rank_is_kept():
    engines = fleet((), ())
    async with AsyncLLM(engines, FRONT) as llm:
        opened = [await llm.open("hi", SamplingParams(max_tokens=60, n=3), f"r{number}") for number in range(2)]
        assert engines.loads == [3, 3]
        pinned = [await llm.open("hi", SamplingParams(max_tokens=60), f"p{number}", engine=1) for number in range(3)]
        assert engines.loads == [3, 6] and engines.placed_by(1)["rank"] == 3
        for stream in (*opened, *pinned):
            await llm.abort(stream.request_id)
        assert engines.loads == [0, 0]


@pytest.mark.parametrize("death", [1, 2, 9, 20, 29])
async def test_requests_of_a_dead_engine_continue_on_another_at_once(death):
    engines = fleet((), (death,))
    async with AsyncLLM(engines, FRONT) as llm:
        loads = []
        engines.engines[1].at_death = lambda: loads.append(engines.loads[:])
        found = await asyncio.gather(*[text_of(llm, f"r{number}", n=2) for number in range(6)])
        assert [texts for texts, _ in found] == [[TEXT, TEXT]] * 6
        assert engines.engines[1].deaths == 1 and loads == [[12, 0]], "none waits while an engine lives"
        assert Counter(stream.deaths for _, stream in found) == {0: 3, 1: 3}
        assert engines.loads == [0, 0] and llm.is_ready


PAGE, TENANT = 4, "tenant"
OF_ENGINE, OURS = PrefixHasher("an engine's weights", PAGE), PrefixHasher("", PAGE)


def story(*words):
    """A prompt of pages, each of one number."""
    return np.repeat(np.array(words, np.int32), PAGE)


def digests_of(hasher, tokens, salt=TENANT):
    return hasher.after(hasher.root(salt), tokens)


def stored(tokens, first=0, salt=TENANT, group=0):
    digests = digests_of(OF_ENGINE, tokens, salt)
    parent = digests[first - 1] if first else None
    return PageEvent(PageChange.STORED, group, tuple(digests[first:]), parent, tokens[first * PAGE :], salt)


def test_the_book_of_an_engine_follows_its_index():
    book, long = PageBook(OURS), digests_of(OURS, story(1, 2, 3, 4))
    book.take([PageEvent(PageChange.CLEARED), stored(story(1, 2))])
    assert book.begins(long) == 2 and book.begins(digests_of(OURS, story(1, 9))) == 1
    assert book.begins(digests_of(OURS, story(1, 2), "other")) == 0, "another tenant's pages are others"
    book.take([stored(story(1, 2, 3), first=2), stored(story(7), group=1)])
    assert book.begins(long) == 3 and book.begins(digests_of(OURS, story(7))) == 0
    middle = digests_of(OF_ENGINE, story(1, 2))[1:]
    book.take([PageEvent(PageChange.REMOVED, 1, tuple(middle))])
    assert book.begins(long) == 3, "the first group has it"
    book.take([PageEvent(PageChange.REMOVED, 0, tuple(middle))])
    assert book.begins(long) == 1
    book.take([stored(story(1, 2), first=1)])
    assert book.begins(long) == 3
    book.take([stored(story(5, 6, 7), first=2)])
    assert book.begins(digests_of(OURS, story(5, 6, 7))) == 0, "its parent is not there"
    book.take([PageEvent(PageChange.CLEARED)])
    assert book.begins(long) == 0


def test_pages_of_open_requests_count_until_they_end():
    book, names = PageBook(OURS), digests_of(OURS, story(1, 2))
    for _ in range(2):
        book.expect(names)
    book.ended(names)
    assert book.begins(names) == 2
    book.take([stored(story(1))])
    book.ended(names)
    assert book.begins(names) == 1


async def test_a_prompt_goes_to_the_engine_that_has_most_of_it():
    engines = fleet((), ())
    async with AsyncLLM(engines, FRONT) as llm:
        prompts = [[5] * 40, [6] * 40]
        for number, prompt in enumerate(prompts):
            stream = await llm.open(prompt, SamplingParams(max_tokens=2), f"r{number}", engine=1 - number)
            while not stream.finished:
                await stream.next()
        assert engines.loads == [0, 0]
        events = [PageEvent(PageChange.STORED, 0, tuple(bytes([n]) for n in range(40)), None, np.full(40, 5, np.int32))]
        engines.engines[1].receive([m.PageEventList(tuple(events))])
        for number in range(3):
            stream = await llm.open([5] * 40 + [7], SamplingParams(max_tokens=2), f"s{number}")
            while not stream.finished:
                await stream.next()
        assert engines.placed_by(1)["prefix"] == 3


async def test_equal_prompts_that_come_together_go_where_the_first_went_until_it_is_busy():
    engines = fleet((), (), ())
    async with AsyncLLM(engines, FRONT) as llm:
        for number in range(6):
            await llm.open([1 + number] * 50, SamplingParams(max_tokens=60), f"o{number}")
        assert engines.loads == [2, 2, 2]
        for number in range(2):
            await llm.open([9] * 50, SamplingParams(max_tokens=60), f"e{number}")
        assert sorted(engines.loads) == [2, 2, 4]
        for number in range(7):
            await llm.open([9] * 50, SamplingParams(max_tokens=60), f"f{number}")
        assert max(engines.loads) <= 7 and sum(engines.loads) == 15
        await llm.abort_all()


async def test_requests_wait_while_no_engine_lives():
    engines = fleet((3,))
    async with AsyncLLM(engines, FRONT) as llm:
        found = await asyncio.gather(*[text_of(llm, f"r{number}") for number in range(2)])
        assert [texts for texts, _ in found] == [[TEXT]] * 2 and engines.loads == [0]


class Refusing(MortalBackend):
    """An engine that does not make changes as it is told, and can be down."""

    refusal, down = None, False

    def __init__(self, *args):
        super().__init__(*args)
        self.adopted = []

    def ready(self):
        return super().ready() and not self.down

    def adopt(self, order, why):
        self.adopted.append((order, why))

    def put(self, question):
        if self.refusal is None:
            return super().put(question)
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(self.refusal)
        return answer


def test_engines_have_devices_of_their_own():
    config = EngineConfig("demo", data_parallel_size=2, tensor_parallel_size=2)
    assert [one.config.device_ids for one in fleet_of(config, ()).engines] == ["0,1", "2,3"]
    given = EngineConfig("demo", data_parallel_size=2, device_ids="3,1")
    assert [one.config.devices for one in fleet_of(given, ()).engines] == [(3,), (1,)]
    with pytest.raises(ConfigError, match=r"device_ids must be 4 numbers.*such as 0,1,2,3, got '0,1,2'"):
        EngineConfig("demo", data_parallel_size=2, tensor_parallel_size=2, device_ids="0,1,2")
    with pytest.raises(ConfigError, match="device_ids must be 4 numbers"):
        fleet_of(EngineConfig("demo", data_parallel_size=2, tensor_parallel_size=2, device_ids="0,1"), ())
    shared = {"data_parallel_size": 2, "device_ids": "0,0"}
    with pytest.raises(ConfigError, match="device_ids: engines that share a GPU"):
        fleet_of(EngineConfig("demo", **shared), ())
    assert len(fleet_of(EngineConfig("demo", **shared, kv_cache_memory_bytes=2**30), ()).engines) == 2


def test_one_object_is_one_engine():
    with pytest.raises(ConfigError, match="data_parallel_size: one object is one engine"):
        one_engine(EngineConfig("demo", data_parallel_size=2))


async def test_orders_go_to_all_engines():
    engines = Fleet([Refusing(core()), Refusing(core())])
    async with AsyncLLM(engines, FRONT) as llm:
        await llm.pause_generation(mode="keep")
        assert all(one.paused is OperatorOrder.FREEZE for one in engines.engines)
        await llm.resume_generation()
        await llm.reset_prefix_cache()
        for one in engines.engines:
            assert one.core.orders == [OperatorOrder.FREEZE, OperatorOrder.RESUME, OperatorOrder.FORGET]
            assert one.paused is None
        with pytest.raises(RequestError, match="this core has no weights"):
            await llm.update_weights("there")
        await llm.change_adapter(AdapterChange("a", "there"))
        assert llm.info.adapters == ("a",)
        assert not any(one.adopted for one in engines.engines)


async def test_an_engine_that_alone_refuses_a_change_is_started_again_with_it():
    engines = Fleet([Refusing(core()), Refusing(core())])
    async with AsyncLLM(engines, FRONT) as llm:
        engines.engines[1].refusal = RequestError("no room")
        await llm.change_adapter(AdapterChange("a", "there"))
        [(order, why)] = engines.engines[1].adopted
        assert order.change.name == "a" and "engine 1 did not make a change" in why and "no room" in why
        streams = [await llm.open("hi", SamplingParams(max_tokens=9), f"r{n}", adapter="a") for n in range(2)]
        assert engines.loads == [2, 0], "the other has no such adapter"
        for stream in streams:
            stream.close()


async def test_an_engine_that_dies_during_a_change_waits_for_its_outcome():
    engines = Fleet([Refusing(core()), Refusing(core())])
    async with AsyncLLM(engines, FRONT) as llm:
        engines.engines[0].put = lambda question: answer
        engines.engines[1].refusal, answer = EngineDeadError("killed"), asyncio.get_running_loop().create_future()
        change = asyncio.create_task(llm.change_adapter(AdapterChange("a", "there")))
        while engines.engines[1].may_restart.is_set():
            await asyncio.sleep(0)
        assert not engines.engines[1].adopted
        answer.set_result(None)
        await change
        assert engines.engines[1].adopted and engines.engines[1].may_restart.is_set()


async def test_an_order_is_repeated_for_the_living_when_an_engine_dies_over_it():
    engines = Fleet([Refusing(core()), Refusing(core())])
    async with AsyncLLM(engines, FRONT) as llm:
        put = engines.engines[1].put

        def dies_once(question):
            engines.engines[1].refusal, engines.engines[1].put = EngineDeadError("killed"), put
            answer = put(question)
            engines.engines[1].refusal, engines.engines[1].down = None, True
            return answer

        engines.engines[1].put = dies_once
        await llm.pause_generation(mode="keep")
        assert engines.engines[0].core.orders == [OperatorOrder.FREEZE] * 2


async def test_engines_that_share_no_pages_are_chosen_by_load():
    alone = [MortalBackend(says(TEXT)) for _ in range(2)]
    alone[0].config = EngineConfig("demo", enable_prefix_caching=False)
    engines = Fleet(alone)
    async with AsyncLLM(engines, FRONT) as llm:
        opened = [await llm.open("hi", SamplingParams(max_tokens=60), f"r{number}") for number in range(6)]
        assert engines.loads == [3, 3] and engines.placed_by(0)["prefix"] == 0
        for stream in opened:
            stream.close()


async def test_a_change_waits_for_engines_that_are_down():
    engines = Fleet([Refusing(core()), Refusing(core())])
    async with AsyncLLM(engines, FRONT) as llm:
        engines.engines[1].down = True
        with pytest.raises(EngineDeadError, match="engine 1 is being restarted"):
            await llm.change_adapter(AdapterChange("a", "there"))
        with pytest.raises(EngineDeadError, match="engine 1 is not running"):
            await text_of(llm, "pinned", engine=1)
        await llm.reset_prefix_cache()
        assert engines.engines[1].core.orders == []


async def test_a_request_does_not_continue_on_other_weights():
    engines = Fleet([Refusing(core()), MortalBackend(says(TEXT), (5,))])
    async with AsyncLLM(engines, FRONT) as llm:
        stream = await llm.open("hi", SamplingParams(max_tokens=60), "r", engine=1)
        await stream.next()
        engines.engines[0].changes[""] += 1
        with pytest.raises(EngineDeadError, match="no engine is running that could serve this request, or continue it"):
            while True:
                await stream.next()


async def test_the_end_of_the_last_engine_is_the_end():
    ended = []
    engines = Fleet([MortalBackend(says(TEXT)), MortalBackend(says(TEXT))], ended.append)
    async with AsyncLLM(engines, FRONT) as llm:
        streams = [await llm.open("hi", SamplingParams(max_tokens=60), f"r{number}") for number in range(2)]
        engines.engines[0].died(EngineDeadError("gone"))
        assert llm.is_ready and not ended and engines.loads == [0, 2]
        engines.engines[1].died(EngineDeadError("gone too"))
        assert not llm.is_ready and str(ended[0]) == "gone too"
        for stream in streams:
            with pytest.raises(EngineDeadError):
                while True:
                    await stream.next()


def test_the_numbers_of_several_engines_are_sums():
    one, other = Stats(queue=QueueCounts(1, 2, 3, 4, 5)), Stats(queue=QueueCounts(10, 20, 30, 40, 50))
    assert one.beside(other).queue == QueueCounts(11, 22, 33, 44, 55)
