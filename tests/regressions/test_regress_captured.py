"""Rows about captured steps: what a replay reads, and what a fence beside it says."""

from __future__ import annotations

import pytest
import torch
from harness import captures_at_once, checksum_loop, script, sizes
from scenes import broken, play

from gapless.step.executor import Executor
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

SEEDS, MOODS = range(8), (None, "lazy", "starve")


def replayed(mood):
    """Drawn scripts on engines at depth 8 that capture each program when they first miss it."""
    steps = 0
    for seed in SEEDS:
        shape = sizes(seed)
        loop = checksum_loop(SimDevice(seed, mood, maps_host=seed % 2 == 0), shape, 8, **captures_at_once(shape))
        steps += play(loop, script(seed, shape.max_len)).counters.graph_steps
    assert steps > 100, "steps were meant to be replays"


@pytest.mark.seeds
def test_row_076_a_captured_decode_step_reads_its_own_packet_alone():
    """Captured decode steps crashed at the third token, and only where the host ran ahead; no cause was found. Here a
    graph holds addresses of buffers on the device alone, and what differs from step to step is uploaded to them in
    stream order, so steps that are replayed eight deep give the tokens of a direct computation."""

    def scene():
        for mood in MOODS:
            replayed(mood)

    def from_the_host(executor, order):
        own = executor.buffers
        words = executor.packets.slots[0].tensor.view(torch.int32)[executor.first :]
        executor.buffers = own._replace(words=words)
        try:
            return capture(executor, order)
        finally:
            executor.buffers = own

    scene()
    capture = Executor.capture
    with broken(Executor, "capture", from_the_host):
        scene()
