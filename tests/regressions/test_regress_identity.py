"""Rows of the class identity: something in flight is taken for something else of the same name or number."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest
from adapted_checksum import NUMBERS, adapted_loop, expected
from fronts_and_cores import PRINTABLE, Gated, engine_core, front_of, letter, read_all, tokens_of
from harness import VOCAB, checksum_loop, model_loop, small_outbox_ring
from mutation.tools import replaced
from scenes import Log, Passed, Prefers, broken, collect, job, must_fail, play, request, tokens

from gapless.base.errors import DeviceError, EngineDeadError
from gapless.base.params import SamplingParams
from gapless.device import CpuDevice
from gapless.device.fault import Fault
from gapless.loop.build import Sizes
from gapless.loop.loop import Loop
from gapless.memory.adapters import AdapterSlots
from gapless.memory.index import PrefixIndex
from gapless.memory.rows import RowTable
from gapless.step.launcher import Launcher
from gapless.step.outbox import Outbox
from gapless.testing.checksum import ChecksumModel, continue_prompt
from gapless.testing.sim import SimDevice

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


def test_row_037_a_line_of_an_older_owner_is_dropped_and_counted():
    """Should an output come late all the same, it names row and generation. Here lines of an aborted request are played
    back into the steps of the next owner of its row: not one of them counts."""

    def scene(tweak=lambda out, loop: out):
        loop = checksum_loop(SimDevice(0, "lazy"), Sizes(1, 48, 25, 4, 8, 8), 8)
        read, old = loop.launcher.read, []

        def with_a_ghost(flight):
            out = read(flight)
            if not loop.planner.by_key:
                return out
            if 1 in loop.planner.by_key:
                old.append([column.copy() for column in out[1:]])
                return out
            return tweak(Outbox(out.step, *(np.concatenate(both) for both in zip(out[1:], old[-1], strict=True))), loop)

        loop.launcher.read = with_a_ghost
        assert _run_two(loop) == continue_prompt(tokens(2, 5), 20, VOCAB)
        assert loop.counters.dropped_identity == 20

    def without_generations(out, loop):
        return out._replace(generations=loop.rows.generation[out.rows])

    scene()
    with must_fail():
        scene(without_generations)


def _run_two(loop):
    """One request, aborted; then the tokens of another on the same row."""
    loop.submit(request(1, tokens(1, 5), 40))
    for _ in range(12):
        loop.turn()
    loop.abort(1)
    while loop.has_work():
        loop.turn()
    loop.submit(request(2, tokens(2, 5), 20))
    settled = []
    for _ in range(100):
        for item in loop.turn().tokens:
            settled += item.tokens.tolist()
    assert not loop.has_work(), "the request does not end"
    return settled


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


@pytest.mark.parametrize("turns", range(0, 30, 3))
def test_row_039_an_abort_may_come_at_any_time_and_twice(turns):
    """An abort that raced with the end of a request hit a look-up that was not there, and the engine died. Here unknown
    keys, second aborts and aborts of what has ended or never came are ignored, at every moment of a run."""

    def scene():
        loop = checksum_loop(SimDevice(turns, "lazy"), Sizes(2, 48, 25, 4, 6, 16), 8)
        jobs = [job(key, tokens(key, 9), 1 + 4 * key, stop_ids=(3, 5)) for key in range(6)]
        for one in jobs[:4]:
            loop.submit(one.request)
        for _ in range(turns):
            loop.turn()
        for _ in range(2):
            for key in (0, 1, 3, 4, 99):
                loop.abort(key)
            loop.turn()
        for one in jobs[4:]:
            loop.submit(one.request)
        while loop.has_work():
            for settled in loop.turn().tokens:
                for key, token, _ in settled.entries():
                    jobs[key].tokens.append(token)
        assert jobs[4].tokens == jobs[4].expected() and jobs[5].tokens == jobs[5].expected()
        play(loop, [])

    scene()
    with broken(Loop, "abort", lambda loop, key: loop.planner.finish(loop.planner.by_key[key])):
        scene()


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


def test_row_081_slots_do_not_wrap_over_steps_in_flight():
    """A ring of future tokens had room for three batches and wrapped at high concurrency: wrong answers, no error. Here
    the outbox ring has a slot more than steps can be in flight, and a slot comes back when the host has read it."""

    def scene(tweak=lambda loop: None):
        for seed in range(3):
            loop = checksum_loop(SimDevice(seed, "bursts", maps_host=seed == 1), Sizes(64, 32, 600, 4, 96, 99), 8)
            tweak(loop)
            play(loop, [job(key, tokens(key, 2 + key % 5), 3 + key % 17) for key in range(90)])
            assert max(record.decode_rows for record in loop.records) > 50

    def short(loop):
        small_outbox_ring(loop, 2)

    scene()
    scene(short)

    def returned_at_launch(launcher, plan, requests):
        flight = launch(launcher, plan, requests)
        launcher.executor.outboxes.retire(flight.outbox, Passed())
        return flight

    launch = Launcher.launch
    with patch.object(Launcher, "release"), broken(Launcher, "launch", returned_at_launch):
        scene(short)


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


def test_row_041_requests_of_several_adapters_with_one_prompt_share_neither_slot_nor_pages():
    """A request was served with the adapter of another tenant, whose number it had. Here a row reads the slot that it
    leases, a slot is loaded again only when the last step of its rows is observed, and the digest of an adapter is part
    of what its pages are found by: four adapters take turns in one slot, all with the same prompt."""

    def scene():
        for seed in range(4):
            loop = adapted_loop(SimDevice(seed), Sizes(3, 48, 60, 4, 12, 16), 4, slots=1)
            asked = [
                request(key, tokens(1, 12), 6)._replace(adapter=name) for key, name in enumerate((*NUMBERS, *NUMBERS))
            ]
            found = collect(loop, asked)
            assert all(found[one.key] == expected(one) for one in asked), "tokens of another adapter"
            assert loop.adapters.slots.loads >= len(NUMBERS)

    def same_pages(original, self, prompt, salt, adapter=""):
        return original(self, prompt, salt)

    def uncounted(original, self, adapter):
        slot = original(self, adapter)
        self.rows.clear()
        return slot

    scene()
    with must_fail(), replaced(PrefixIndex, "chain", same_pages):
        scene()
    with must_fail(), replaced(AdapterSlots, "take", uncounted), replaced(AdapterSlots, "retire", lambda *_: None):
        scene()
