"""Rows of the class staging: a host buffer written again while the device still has to read it."""

from __future__ import annotations

import pytest
from harness import checksum_loop, request
from scenes import (
    broken,
    job,
    must_fail,
    play,
    short_packets,
    tokens,
)

from gapless.engine.warm_up import WARM_UP_KEY
from gapless.loop.spec import Sizes
from gapless.testing.sim import SimDevice, SimStream

pytestmark = pytest.mark.unguarded

SEEDS = range(6)


def test_row_005_a_warm_up_request_joins_the_protocol():
    """Idle ranks ran dummy steps that wrote the shared pinned buffers outside the protocol. Here a warm-up is a request
    like any other: one in the middle of eight steps in flight changes no tokens."""
    shape = Sizes(4, 40, 41, 4, 8, 64)

    def scene(warm_up):
        for seed in SEEDS:
            loop = checksum_loop(SimDevice(seed, "lazy"), shape, 8)
            short_packets(loop)
            jobs = [job(key, tokens(key, 9), 20) for key in range(3)]
            for one in jobs:
                loop.submit(one.request)
            settled = [item for _ in range(20) for item in warm(loop, warm_up)]
            while loop.has_work():
                settled += loop.turn().tokens
            for one in jobs:
                mine = [t for s in settled for k, t, _ in s.entries()
                        if k == one.request.key]  # fmt: skip
                assert mine == one.expected()

    def warm(loop, warm_up):
        found = loop.turn().tokens
        warm_up(loop)
        return found

    def as_a_request(loop):
        if WARM_UP_KEY not in loop.planner.by_key:
            loop.submit(request(WARM_UP_KEY, [0] * 8, 1, temperature=0.5, top_k=5))

    def outside(loop):
        slot = loop.launcher.executor.packets.slots[0]
        slot.array[:] = 0

    scene(as_a_request)
    with must_fail():
        scene(outside)


def test_row_006_the_fences_of_a_step_do_not_depend_on_the_depth():
    """The event that guards staging was made only when asynchronous scheduling was on, but another feature overlapped
    too. Here depth is a number: a step at depth 1 enqueues exactly what a step at depth 8 does, fences included."""

    def operations(depth):
        device = SimDevice(0, "eager")
        play(checksum_loop(device, Sizes(2, 32, 17, 4, 8, 8), depth), [job(1, tokens(1, 20), 8)])
        streams = {name for name, _, _ in device.trace}
        return {name: [what for stream, _, what in device.trace if stream == name] for name in streams}

    reference = operations(1)
    assert reference["token_out"][:2] == ["after compute", "Executor.copy_lines"]
    assert operations(2) == operations(8) == reference

    def only_when_asynchronous(stream, fence):
        if len(stream.queue) > 1:
            after(stream, fence)

    after = SimStream.after
    with broken(SimStream, "after", only_when_asynchronous):
        assert operations(2) == operations(8) == operations(1) == reference
