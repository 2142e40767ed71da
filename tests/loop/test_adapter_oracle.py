"""Rows of more adapters than there are slots: whom a load holds up, and faults that the oracle of adapters notices."""

from __future__ import annotations

import pytest
from adapted_checksum import adapted_loop
from harness import request, sizes

from gapless.base.errors import RequestError
from gapless.testing.sim import SimDevice


def asking(key, adapter, length=8):
    return request(key, [key, 1], length - 2, adapter=adapter)


def test_requests_that_wait_for_an_adapter_hold_up_no_others():
    shape = sizes(0)._replace(rows=4, pages=400, step_tokens=200, queue=400)
    loop = adapted_loop(SimDevice(1, "eager"), shape, 2)
    names = ["ann", "bob", "cem", "dov", "", ""]
    ends = {}
    for key, name in enumerate(names):
        loop.submit(asking(key, name, 40 if key < 2 else 8))
    turns = 0
    while loop.has_work():
        for settled in loop.turn().tokens:
            ends |= dict.fromkeys(settled.keys[settled.flags != 0].tolist(), turns)
        turns += 1
    assert max(ends[4], ends[5]) < min(ends[0], ends[1]) < min(ends[2], ends[3])


def test_an_adapter_that_everybody_asks_for_makes_way_for_another():
    shape = sizes(0)._replace(rows=4, pages=400, step_tokens=200, queue=400)
    loop = adapted_loop(SimDevice(1, "eager"), shape, 2)
    for key in range(4):
        loop.submit(asking(key, ("ann", "bob")[key % 2], 40))
    ended, key, late = [], 4, asking(1_000, "cem")
    for turn in range(400):
        if turn == 10:
            loop.submit(late)
        for settled in loop.turn().tokens:
            for done in settled.keys[settled.flags != 0].tolist():
                ended.append(done)
                loop.submit(asking(key, ("ann", "bob")[key % 2], 40))
                key += 1
        if late.key in ended:
            break
    assert late.key in ended and len(ended) < 12


def test_an_adapter_that_is_not_there_is_refused():
    loop = adapted_loop(SimDevice(1), sizes(0), 2)
    with pytest.raises(RequestError, match="no adapter 'eve'"):
        loop.submit(asking(1, "eve"))
    assert not loop.requests and not loop.has_work()
