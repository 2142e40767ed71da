"""Rows about captured steps: what a replay reads, and what a fence beside it says."""

from __future__ import annotations

from unittest.mock import patch

import torch
from harness import Job, captures_at_once, checksum_loop, script, sizes
from scenes import broken, play, request, tokens

from gapless.loop.build import HostSizes, Sizes
from gapless.memory.host import HostTier
from gapless.step.executor import Executor
from gapless.testing.sim import SimDevice, SimStream

PLENTY = HostSizes(100 * 4096, 1)
SEEDS, MOODS = range(8), (None, "lazy", "starve")


def replayed(mood):
    """Drawn scripts on engines at depth 8 that capture each program when they first miss it."""
    steps = 0
    for seed in SEEDS:
        shape = sizes(seed)
        loop = checksum_loop(SimDevice(seed, mood, maps_host=seed % 2 == 0), shape, 8, **captures_at_once(shape))
        steps += play(loop, script(seed, shape.max_len)).counters.graph_steps
    assert steps > 100, "steps were meant to be replays"


def test_row_053_no_replay_reads_pages_that_are_still_loaded():
    """A captured step left out the wait for its loads where the whole prompt was cached. Here no step waits for a load:
    a request is admitted once the host has seen its pages arrive, whatever then runs it."""
    shape = Sizes(rows=3, max_len=48, pages=22, page_size=4, step_tokens=8, queue=32)

    def scene():
        replays = loaded = 0
        for seed in SEEDS:
            loop = checksum_loop(SimDevice(seed, "starve"), shape, 8, host=PLENTY, **captures_at_once(shape))
            jobs = [
                Job(request(key + 100 * turn, tokens(key, 21), 9), 7 * (turn * 5 + key), None)
                for turn in range(4) for key in range(5)
            ]  # fmt: skip
            play(loop, jobs)
            replays, loaded = replays + loop.counters.graph_steps, loaded + loop.transfers.host.counts.loaded
        assert replays and loaded > 20

    def at_once(host, most):
        batch = begin(host, most)
        if batch is not None:
            arrive(host, batch, [move.copy.checksum for move in batch.moves])
        return batch

    scene()
    begin, arrive = HostTier.next_load, HostTier.loaded
    with patch.object(HostTier, "loaded", lambda *_: None), broken(HostTier, "next_load", at_once):
        scene()


def test_row_068_the_fence_of_a_replay_is_recorded_after_it():
    """An event was recorded before the replay in front of it had run, and the device hung. Here replays and fences are
    operations of one stream, in the order in which the host enqueued them."""

    def scene():
        for mood in MOODS:
            replayed(mood)

    def in_front(stream, timed=False):
        fence = record(stream, timed)
        if len(stream.queue) > 1 and stream.queue[-1].fence is fence:
            stream.queue.insert(len(stream.queue) - 2, stream.queue.pop())
        return fence

    scene()
    record = SimStream.record
    with broken(SimStream, "record", in_front):
        scene()


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
