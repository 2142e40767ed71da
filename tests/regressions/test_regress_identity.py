"""Rows of the class identity: something in flight is taken for something else of the same name or number."""

from __future__ import annotations

import itertools

import pytest
from fronts_and_cores import PRINTABLE, Gated, engine_core, front_of, letter, read_all, tokens_of
from harness import VOCAB, checksum_loop, model_loop, request
from scenes import Log, Prefers, broken, job, must_fail, play, tokens

from gapless.base.errors import DeviceError, EngineDeadError
from gapless.base.params import SamplingParams
from gapless.device import CpuDevice
from gapless.device.fault import Fault
from gapless.loop.loop import Loop
from gapless.loop.spec import Sizes
from gapless.memory.rows import RowTable
from gapless.testing.checksum import ChecksumModel, continue_prompt
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def same_key(llm):
    """Break: the engine knows a request by the client's name for it."""
    llm.resolver.keys = itertools.repeat(1)


async def test_row_037_an_id_that_is_reused_after_an_abort_names_another_request():
    """After an abort the client's id was used again, and outputs in flight were bound by that name to the new request.
    Here keys are ours and never come twice: what eight steps in flight still bring for the old one is dropped."""

    async def scene(tweak=lambda llm: None):
        for seed in range(3):
            core = Gated(seed)
            async with front_of(core) as llm:
                tweak(llm)
                first = await llm.open(tokens(seed, 5), GREEDY, "mine")
                core.run(14)
                assert core.loop.in_flight > 1
                await llm.abort("mine")
                second = await llm.open(tokens(seed + 7, 6), GREEDY, "mine")
                core.open()
                got, left = tokens_of(await read_all(second)), await read_all(first)
                assert (tokens_of(left), left[-1].finish_reason) == ([], "abort")
                assert got == continue_prompt(tokens(seed + 7, 6), 40, VOCAB), "tokens of another request"

    await scene()
    with must_fail():
        await scene(same_key)


async def test_row_038_an_id_may_be_reused_while_over_run_steps_are_in_flight():
    """A request that had just ended still ran in an extra step when its id came back, and the second one failed. Here
    the front ends a request at its stop string with steps in flight, and the same id can be used at once."""
    prompt = next(p for p in (tokens(key, 5) for key in range(50)) if _good_stop(p))
    expected = continue_prompt(prompt, 40, VOCAB)

    async def scene(tweak=lambda llm: None):
        core = Gated(1)
        async with front_of(core) as llm:
            tweak(llm)
            first = await llm.open(prompt, GREEDY.replace(stop=letter(expected[2])), "mine")
            core.run(14)
            ended = await read_all(first)
            assert (tokens_of(ended), ended[-1].finish_reason) == (expected[:3], "stop")
            assert core.loop.in_flight > 1
            second = await llm.open(tokens(9, 6), GREEDY, "mine")
            core.open()
            got = tokens_of(await read_all(second))
            assert got == continue_prompt(tokens(9, 6), 40, VOCAB), "tokens of another request"

    await scene()
    with must_fail():
        await scene(same_key)


def _good_stop(prompt):
    """Whether the third token is a character that stands alone and has not come before."""
    expected = continue_prompt(prompt, 3, VOCAB)
    return max(expected) < PRINTABLE and expected[2] not in expected[:2]


@pytest.mark.seeds
def test_row_040_a_request_that_comes_back_again_and_again_keeps_its_place():
    """The worker's map of rows fell out of step with the scheduler when a request was resumed twice. Here each return
    is a new admission to a row under a new generation, and no line of an outbox is ever without its owner."""

    def scene():
        most = 0
        for seed in range(4):
            loop = checksum_loop(SimDevice(seed), Sizes(5, 64, 19, 4, 12, 16), 8)
            log = Log(loop)
            play(loop, [job(key, tokens(key, 3), 55) for key in range(5)])
            admissions = [admission for plan in log.plans for admission in plan.admissions]
            owners = [(admission.row, admission.generation) for admission in admissions]
            assert len(set(owners)) == len(owners), "a row and generation had two owners"
            assert loop.counters.dropped_identity == 0
            keys = [admission.key for admission in admissions]
            most = max(most, *map(keys.count, set(keys)))
        return most

    assert scene() >= 3, "some request was meant to come back twice"

    def same_generation(rows, key, known, leases):
        row = take(rows, key, known, leases)
        rows.generation[row] = 1
        return row

    take = RowTable.take
    with broken(RowTable, "take", same_generation):
        scene()


class Failing(ChecksumModel):
    """Its ninth forward raises."""

    def __init__(self):
        super().__init__(VOCAB, 64)
        self.count = 0

    def forward(self, inputs, plan, cache):
        self.count += 1
        if self.count == 9:
            raise ZeroDivisionError("the ninth forward failed")
        return super().forward(inputs, plan, cache)


def test_row_075_a_failed_step_shows_its_own_error():
    """A step failed, and what everybody saw was a missing attribute of its missing result. Here the loop raises the
    first error of the device with its cause, and all that was handed out before is right."""

    def scene():
        for seed in range(8):
            loop = model_loop(Failing(), SimDevice(seed), Sizes(2, 64, 33, 4, 8, 8), 8)
            one = job(1, tokens(1, 4), 50)
            loop.submit(one.request)
            with pytest.raises(DeviceError, match="the ninth forward failed") as caught:
                while loop.has_work():
                    for settled in loop.turn().tokens:
                        one.tokens += settled.tokens.tolist()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert one.tokens == one.expected()[: len(one.tokens)] and len(one.tokens) <= 8

    scene()

    def bare(fault):
        if fault.error is not None:
            raise DeviceError("a step has no result")

    with broken(Fault, "check", bare):
        scene()


def test_row_075_what_was_settled_is_handed_out_before_the_error():
    """The failure may show in the turn that settles the step in front of it. That step's token goes out first."""
    model, device = Failing(), SimDevice(0, "manual", maps_host=True)
    loop = model_loop(model, device, Sizes(1, 64, 33, 4, 8, 8), 11)
    one = job(1, tokens(1, 4), 50)
    loop.submit(one.request)
    for _ in range(10):
        assert not loop.turn().tokens
    while model.count < 8:
        device.advance(1)
    device.advance(1)  # the eighth step is complete, and the ninth has not begun
    commit = loop.commit

    def then_the_ninth_runs(flight):
        if flight.plan.step == 8:
            device.adversary = Prefers("compute")
        return commit(flight)

    loop.commit = then_the_ninth_runs
    with pytest.raises(DeviceError, match="the ninth forward failed"):
        while loop.has_work():
            one.tokens += [token for settled in loop.turn().tokens for token in settled.tokens.tolist()]
    assert one.tokens == one.expected()[:8]


async def test_row_075_every_open_request_gets_the_reason():
    """The same from the outside, on threads: each stream ends with the root cause, and the engine says it is down."""
    core = engine_core(CpuDevice(threads=1), Failing())
    async with front_of(core) as llm:
        streams = [await llm.open(tokens(key, 4), GREEDY) for key in range(3)]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the ninth forward failed"):
                await read_all(stream)
        assert not llm.is_ready


@pytest.mark.seeds
def test_row_083_what_was_handed_out_does_not_change_afterwards():
    """Two threads shared one list of output ids, and one read it while the other wrote. Here the tokens of a step are
    copies: a reader that comes a hundred steps late finds what it was given."""

    def contents(settled):
        return [column.tolist() for column in (*settled[1:4], *settled.logprobs)]

    def scene():
        for maps_host in (False, True):
            loop = checksum_loop(SimDevice(0, maps_host=maps_host), Sizes(4, 48, 49, 4, 16, 16), 8)
            for key in range(8):
                loop.submit(request(key, tokens(key, 4), 40, logprobs=key % 3, prompt_logprobs=1))
            given = []
            while loop.has_work():
                given += [(settled, contents(settled)) for settled in loop.turn().tokens]
            assert len(given) > 70
            for settled, copy in given:
                assert contents(settled) == copy, f"step {settled.step} has changed"

    scene()

    def views(loop, flight):
        out = loop.launcher.read(flight)
        settled = commit(loop, flight)
        return settled._replace(tokens=out.tokens[:, 0], flags=out.flags)

    def scored_views(loop, flight):
        lines, settled = loop.launcher.read_logprobs(flight), commit(loop, flight)
        return settled._replace(logprobs=settled.logprobs._replace(top_ids=lines.top_ids))

    commit = Loop.commit
    for shortcut in (views, scored_views):
        with broken(Loop, "commit", shortcut):
            scene()
