"""The engine on the fake accelerator under no_sync and no_race: silent as it is, and loud about planted faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from harness import captures_at_once, checksum_loop, run, script, sizes
from loops_under_guard import watch

from gapless import guard
from gapless.guard.race import Race, no_race
from gapless.testing import fake
from gapless.testing.guarded import StepGuard, guarded

pytestmark = [pytest.mark.fake, pytest.mark.unguarded]


@pytest.fixture
def device() -> Iterator[fake.FakeDevice]:
    made = fake.FakeDevice.open(1)
    fake.delays(7)
    yield made
    fake.delays(None)
    made.close()


def recording() -> StepGuard:
    """Return a guard whose findings do not raise: a test's device has reserved no memory, so steps take some."""
    made = StepGuard()
    made.region = guard.no_sync(mode="record", slow_ms=0)
    return made


def waits(checked: StepGuard) -> list[str]:
    return [one for one in checked.trouble() if "allocator-growth" not in one]


@pytest.mark.parametrize("seed, depth", [(0, 4), (1, 1), (1, 4), (3, 8)])
def test_steps_on_the_fake_wait_nowhere(device, seed, depth):
    shape = sizes(seed)
    jobs = script(seed, shape.max_len)
    with guarded(recording()) as checked:
        loop = checksum_loop(device, shape, depth, **(captures_at_once(shape) if seed % 2 else {}))
        run(loop, jobs)
        for job in jobs:
            job.check(f"seed {seed}")
    assert checked.launched >= loop.counters.steps > 10 and waits(checked) == []


def test_a_step_that_reads_a_device_tensor_on_the_fake_is_found(device):
    shape = sizes(0)
    jobs = script(0, shape.max_len)
    with guarded(recording()) as checked:
        loop = checksum_loop(device, shape, 2)
        executor = loop.launcher.executor
        enqueue = executor.enqueue

        def reading(steps):
            executor.buffers.tokens.max().item()
            enqueue(steps)

        executor.enqueue = reading
        run(loop, jobs)
    found = waits(checked)
    assert found and all("host-size" in one for one in found)


def raced(device, seed: int, depth: int | None, **graphs: int) -> list[Race]:
    """Return the races of an engine, all of whose memory is watched."""
    shape = sizes(seed)
    with no_race("record", track="all") as checker:
        loop = checksum_loop(device, shape, depth, **graphs)
        watch(checker, loop)
        run(loop, script(seed, shape.max_len))
        device.drain()
    assert not graphs or len(loop.launcher.graphs)
    return checker.races


@pytest.mark.parametrize("seed, depth", [(0, 1), (0, 2), (1, 4), (0, None)])
@pytest.mark.parametrize("captures", [False, True])
def test_the_engine_on_the_fake_has_no_race(device, seed, depth, captures):
    races = raced(device, seed, depth, **(captures_at_once(sizes(seed)) if captures else {}))
    assert races == [], str(races[0])


def test_tokens_that_a_captured_step_still_writes_are_found_when_they_are_copied(device):
    device.token_out.after = lambda fence: fake.load().drain()  # in order, and the checker does not see it
    races = raced(device, 0, 2, **captures_at_once(sizes(0)))
    assert {(race.buffer, race.first.verb, race.second.verb) for race in races} == {("lines", "writes", "reads")}


def test_a_packet_that_is_written_while_it_travels_is_found_on_the_fake(device):
    shape = sizes(0)
    with no_race("record") as checker:
        loop = checksum_loop(device, shape, 2)
        watch(checker, loop)
        executor = loop.launcher.executor
        enqueue = executor.enqueue

        def hasty(steps):
            for _, words in steps.uploads.values():
                with torch.inference_mode():
                    words[:1].copy_(words[:1].clone())
            enqueue(steps)

        executor.enqueue = hasty
        run(loop, script(0, shape.max_len))
    assert {one.buffer.split("[")[0] for one in checker.races} == {"packet"}
