"""Rows about KV that is stored in the host's memory and loaded from there, beside the steps that write and read it."""

from __future__ import annotations

import pytest
import torch
from harness import Job, checksum_loop, contents_of, kernels_for, request
from scenes import play, tokens

from gapless.loop.spec import HostSizes, Sizes
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded

PLENTY = HostSizes(100 * 4096, 1)
SHAPE = Sizes(rows=3, max_len=48, pages=14, page_size=4, step_tokens=8, queue=32)
"""The pages of one longest sequence and a little more."""


def hosted(device, jobs, depth=8, shape=SHAPE, tweak=lambda loop: None, kernels=None):
    """Play jobs with a host tier; every copy holds what its digest means."""
    loop = checksum_loop(device, shape, depth, host=PLENTY, kernels=kernels)
    tweak(loop)
    play(loop, jobs)
    contents, slots = contents_of(loop, jobs), loop.parts.transfers.slots[0]
    for digest, copy in loop.parts.transfers.host.groups[0].copies.items():
        entries = slots[copy.slot].view(torch.int64).view(loop.launcher.executor.program.cache.data.shape[1:])
        if contents.knows(digest):
            contents.check(digest, entries, "a copy")
    assert not loop.parts.transfers.host.counts.refused, "what came back was not what was stored"
    return loop


def conversations(count=4, length=20, new=9, rounds=2):
    """Prompts of their own, each of which comes again when the others have taken its pages."""
    return [
        Job(request(key + 100 * turn, tokens(key, length), new), 25 * (turn * count + key), None)
        for turn in range(rounds) for key in range(count)
    ]  # fmt: skip


def test_row_050_pages_of_generated_tokens_are_stored():
    """Hashes of pages lagged behind, so decoded tokens never left the device. Here a row that leaves publishes all that
    is full, and the next turn of the conversation loads it."""
    first = Job(request(1, tokens(1, 5), 30), 0, None)
    known = [*tokens(1, 5), *first.expected()]
    others = [Job(request(2 + key, tokens(9 + key, 40), 5), 60 + 30 * key, None) for key in range(2)]
    last = Job(request(9, known[:34], 5), 200, None)
    loop = hosted(SimDevice(1), [first, *others, last])
    assert loop.parts.transfers.host.counts.loaded == 33 // 4


def test_row_042_a_request_that_leaves_while_its_pages_load_frees_nothing_twice():
    """An abort freed pages that a transfer freed again. Here the pages of a load belong to the load; what the request
    owns by then is a place in the queue."""
    left = 0
    for seed in range(8):
        jobs = conversations()
        loop = checksum_loop(SimDevice(seed, "lazy"), SHAPE, 4, host=PLENTY, kernels=kernels_for(seed))
        play(loop, jobs[:4])
        for one in jobs[4:]:
            loop.submit(one.request)
            for _ in range(5):
                if loop.pools[0].counts().owned and not loop.in_flight:
                    left += 1
                    break
                loop.turn()
            loop.abort(one.request.key)
            loop.pools[0].check([])
        play(loop, conversations(rounds=1))
    assert left > 8, "requests were meant to leave during loads"
